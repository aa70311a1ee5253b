"""Migrations of the generations table; only Django imports them."""
