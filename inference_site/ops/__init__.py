"""Operation: ``manage.py serve``, ``doctor``, health and metrics."""
