"""Ollama's API over the same models, keys, limits and queue."""
