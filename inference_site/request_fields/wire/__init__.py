"""Wire models of the shared request fields; the API apps import them."""
