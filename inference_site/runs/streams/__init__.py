"""Event logs and request documents in Redis; web processes and workers import it."""
