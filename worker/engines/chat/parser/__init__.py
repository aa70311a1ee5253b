"""Parses a model's text into content, reasoning and calls; ``worker.engines`` imports it."""
