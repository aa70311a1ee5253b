"""The lowest layer: domain values, errors, PostgreSQL, Redis, logs, metrics and traces."""
