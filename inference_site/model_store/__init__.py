"""Models that operators keep in the database, and their pulls from a hub, in any process."""
