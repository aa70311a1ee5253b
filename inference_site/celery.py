"""The Celery application; its configuration is in the settings, prefix ``CELERY_``."""

import os
import sys
import time
from collections import deque
from typing import Any, ClassVar

import django
import kombu
from celery import Celery, signals
from celery.app.amqp import AMQP
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
try:
    settings.INSTALLED_APPS  # noqa: B018  # Reads the settings.
except ImproperlyConfigured as exc:  # Celery's own commands would print a traceback.
    sys.exit(f"{str(exc).rstrip('.')}. See docs/settings.md.")


class _Broker(kombu.Connection):
    """Tries every second to connect; kombu would wait up to 30 s after Redis is back.

    A Redis that takes no writes accepts connections, and then refuses to read wake-ups: the
    consumer connects again at once, so at most two connections a second are made.
    """

    _recent: ClassVar[deque[float]] = deque(maxlen=2)

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, and try until it succeeds; the worker's consumer calls this."""
        if len(self._recent) == self._recent.maxlen:
            time.sleep(max(0.0, self._recent[0] + 1 - time.monotonic()))
        self._recent.append(time.monotonic())
        every_second = {"interval_start": 1, "interval_step": 0, "interval_max": 1}
        return super().ensure_connection(*args, **{**every_second, **options})


class _Amqp(AMQP):
    Connection = _Broker


# Celery's fix-ups for Django would close every connection and cache around each task; see tasks.py.
app = Celery("inference_site", amqp=_Amqp, fixups=[])
app.set_default()
# Celery's settings alone: `celery report` and `inspect conf` show all, and hide few passwords.
app.config_from_object(
    {
        name.removeprefix("CELERY_").lower(): getattr(settings, name)
        for name in dir(settings)
        if name.startswith("CELERY_")
    }
)
# The program `celery` removes the project's folder again after it has imported this module.
sys.path.append(str(settings.BASE_DIR))


@signals.import_modules.connect(weak=False)
def _set_up_django(**_: Any) -> None:
    """Load Django's apps before the tasks, in Celery's own commands and Flower."""
    if not apps.ready:
        django.setup()


@signals.celeryd_init.connect(weak=False)
def _refuse_a_worker_without_models(options: dict[str, Any], **_: Any) -> None:
    """End `celery worker`: it would be online, and could run nothing."""
    if "runtime" not in options:
        sys.exit("A worker of the site loads models: start it by `manage.py worker`.")


@signals.beat_init.connect(weak=False)
def _refuse_a_beat_without_a_schedule(**_: Any) -> None:
    """End `celery beat`: it would run, and do none of the periodic work."""
    sys.exit("The periodic work of the site has no schedule of Celery: start `manage.py beat`.")


app.autodiscover_tasks(["worker"])
