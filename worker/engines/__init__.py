"""Adapters to inference libraries, without Django; only ``worker.runtime`` imports them."""
