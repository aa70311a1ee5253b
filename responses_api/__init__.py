"""The API of responses and conversations."""
