"""Responses and conversations; only URLs, settings and the console name it."""
