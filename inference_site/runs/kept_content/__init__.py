"""Prompts and answers of requests that are not stored, kept some hours for debugging."""
