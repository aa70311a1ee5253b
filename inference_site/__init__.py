from inference_site.celery import app as celery_app

__all__ = ["celery_app"]

VERSION = "0.1.0"
"""As in pyproject.toml."""
