"""What all other packages use: domain values, errors, PostgreSQL, Redis, logs, metrics, traces."""
