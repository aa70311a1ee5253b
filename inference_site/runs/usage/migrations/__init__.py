"""Migrations of the roll-up tables; only Django imports them."""
