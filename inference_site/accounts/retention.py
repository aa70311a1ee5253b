"""Until when what projects store is kept: each project's own setting, or else the site's."""

from __future__ import annotations

import datetime as dt
import random
from typing import Literal

from django.utils import timezone

from inference_site.accounts.models import Project
from inference_site.site_settings.current import site_settings

Kept = Literal["responses_days", "conversations_days", "completions_days"]


def kept_since(kind: Kept) -> list[tuple[int, dt.datetime]]:
    """Return the projects that keep this kind for a time, and since when: what is older may go.

    They come in any order, so that each is once the first when time is short.
    """
    now, of_all = timezone.now(), getattr(site_settings(), kind)
    rows = list(Project.objects.values_list("pk", kind))
    random.shuffle(rows)
    days = ((pk, of_all if own is None else own) for pk, own in rows)
    return [(pk, now - dt.timedelta(days=count)) for pk, count in days if count is not None]
