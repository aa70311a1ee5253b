"""The model catalogue: models file, discovery, GGUF headers, and what each engine supports."""
