"""The processes of ``manage.py serve``."""
