"""The checks of ``manage.py doctor``."""
