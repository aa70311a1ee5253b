"""The static files as `make serve` and the images serve them: few bytes, which browsers keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

COLD_BYTES = 400_000
"""What a browser without a cache may read for the first page: styles, scripts and fonts."""


@pytest.mark.django_db
def test_the_first_page_is_small_and_browsers_keep_its_files(settings: Any, tmp_path: Path) -> None:
    """Collected files are compressed, have their hashes in their names, and may be kept."""
    collected = {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"}
    settings.STORAGES = settings.STORAGES | {"staticfiles": collected}
    settings.STATIC_ROOT, settings.WHITENOISE_USE_FINDERS = str(tmp_path), False
    settings.WHITENOISE_AUTOREFRESH = False
    call_command("collectstatic", "--noinput", verbosity=0)
    client = Client(headers={"accept-encoding": "br"})
    client.force_login(User.objects.create_superuser("first", password=None))
    page = client.get("/admin/").content.decode()
    names = set(re.findall(r'<(?:link|script)[^>]*(?:href|src)="(/static/[^"]+)"', page))
    assert len(names) > 10
    sizes = {}
    for name in names:
        answer = client.get(name)
        assert re.search(r"\.[0-9a-f]{12}\.\w+$", name), name
        assert "immutable" in answer["Cache-Control"], name
        sizes[name] = len(b"".join(answer))
    fonts = [*tmp_path.rglob("latin-*.woff2"), *tmp_path.rglob("used.*.woff2")]
    assert len(fonts) == 5
    assert sum(sizes.values()) + sum(font.stat().st_size for font in fonts) <= COLD_BYTES
