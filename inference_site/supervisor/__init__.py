"""The processes of ``manage.py serve``; only that command imports it."""
