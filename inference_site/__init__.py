"""The layers below and above the API apps; pyproject.toml lists them."""
