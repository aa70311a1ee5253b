"""The Celery application; its configuration is in the settings, prefix ``CELERY_``."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
# A worker would import the whole site, with its pages; `manage.py web` runs the checks.
os.environ.setdefault("CELERY_SKIP_CHECKS", "true")

app = Celery("inference_site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
