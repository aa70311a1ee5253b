"""Connections to PostgreSQL and Redis; everything but the domain may import them."""
