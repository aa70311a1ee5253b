"""The Celery application; its configuration is in the settings, prefix ``CELERY_``."""

import os
from typing import Any

import kombu
from celery import Celery
from celery.app.amqp import AMQP

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
# A worker would import the whole site, with its pages; `manage.py web` runs the checks.
os.environ.setdefault("CELERY_SKIP_CHECKS", "true")


class _Broker(kombu.Connection):
    """Tries every second to connect; kombu would wait up to 30 s after Redis is back."""

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, and try until it succeeds; the worker's consumer calls this."""
        every_second = {"interval_start": 1, "interval_step": 0, "interval_max": 1}
        return super().ensure_connection(*args, **{**every_second, **options})


class _Amqp(AMQP):
    Connection = _Broker


app = Celery("inference_site", amqp=_Amqp)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
