"""Models in the database, and pulls."""
