"""The code of worker processes; only ``manage.py worker`` imports it."""
