"""PostgreSQL and Redis; every package but the domain may import it."""
