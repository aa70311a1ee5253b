"""What runs only in a worker process; only ``manage.py worker`` imports it."""
