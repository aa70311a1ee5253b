"""Metrics, logs and traces of one process."""
