"""Migrations of the settings that operators change; only Django imports them."""
