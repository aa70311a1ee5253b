"""One module for each ``manage.py`` command; only Django imports them."""
