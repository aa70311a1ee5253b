"""Migrations of the accounts tables; only Django imports them."""
