"""Migrations of the stored chat completions; only Django imports them."""
