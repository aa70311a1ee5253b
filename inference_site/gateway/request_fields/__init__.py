"""Request fields that several endpoints share; the API apps import them."""
