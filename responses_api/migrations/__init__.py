"""Migrations of responses, items and conversations; only Django imports them."""
