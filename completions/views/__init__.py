"""The endpoints of completions, embeddings, tokens and models; only routes import it."""
