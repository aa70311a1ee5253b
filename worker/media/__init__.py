"""Fetching and decoding the images of requests; only ``worker.runtime`` imports it."""
