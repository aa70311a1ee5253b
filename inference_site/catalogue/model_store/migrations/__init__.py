"""Migrations of models and pulls; only Django imports them."""
