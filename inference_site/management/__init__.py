"""The ``manage.py`` commands of the site; only Django imports them."""
