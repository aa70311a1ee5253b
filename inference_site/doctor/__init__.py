"""The checks of ``manage.py doctor``; only that command imports them."""
