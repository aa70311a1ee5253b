"""What operators run: ``manage.py serve``, ``doctor``, health and metrics."""
