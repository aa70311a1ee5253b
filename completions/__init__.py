"""Chat completions, completions, embeddings and models; only URLs and settings name it."""
