"""What the whole site shares, in layers that pyproject.toml lists; every package may import it."""
