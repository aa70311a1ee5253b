"""What the whole site shares, in layers that pyproject.toml lists; every package may import it."""

from inference_site.celery import app as celery_app

__all__ = ["celery_app"]
