"""A worker's claims, runs, publishing and lease; only its start and its task import it."""
