"""What everything else stands on: domain values, errors, PostgreSQL and Redis, metrics, logs, traces."""
