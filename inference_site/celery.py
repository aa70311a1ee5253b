"""The Celery application; its configuration is in the settings, prefix ``CELERY_``."""

import os

from celery import Celery

from inference_site.generations import wake_ups

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")

wake_ups.install()
app = Celery("inference_site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
