"""Models, adapters and pulls that operators keep in the database."""
