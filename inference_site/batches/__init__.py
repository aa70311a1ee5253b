"""Batches: files of requests that run in the background, and the files of their results."""
