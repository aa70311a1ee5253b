"""The static files as `make serve` and the images serve them: few bytes, which browsers keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

COLD_BYTES = 400_000
"""What a browser without a cache may read for the first page: styles, scripts and fonts."""


@pytest.mark.django_db
def test_the_first_page_is_small_and_browsers_keep_its_files(settings: Any, tmp_path: Path) -> None:
    """Collected files are compressed, have their hashes in their names, and may be kept."""
    collected = {"BACKEND": "inference_site.console.static_files.CollectedStaticFiles"}
    settings.STORAGES = settings.STORAGES | {"staticfiles": collected}
    settings.STATIC_ROOT, settings.WHITENOISE_USE_FINDERS = str(tmp_path), False
    settings.WHITENOISE_AUTOREFRESH = False
    # Of what these pages have nothing of, and which takes as long as all the rest.
    others = ["drf_spectacular_sidecar", "rest_framework"]
    call_command("collectstatic", "--noinput", ignore_patterns=others, verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("first", password=None))
    first = [read(client, name, "br") for name in files_of(client, "/admin/")]
    fonts = [*tmp_path.rglob("latin-*.woff2"), *tmp_path.rglob("used.*.woff2")]
    assert len(first) > 10
    assert len(fonts) == 5
    assert sum(map(len, first)) + sum(font.stat().st_size for font in fonts) <= COLD_BYTES
    seen: set[str] = set()
    unread = files_of(client, "/admin/") | files_of(client, "/admin/playground/")
    while unread:
        name = unread.pop()
        text = read(client, name, "identity").decode()
        seen.add(name)
        if name.endswith(".js"):
            imported = re.findall(r'(?m)^import[^;]*?"(\.\.?/[^"]+)"', text)
            unread |= {urljoin(name, other) for other in imported} - seen
    assert any("/playground/dom." in name for name in seen), "a module that only modules import"


def read(client: Client, name: str, encoding: str) -> bytes:
    """A file that browsers may keep for ever, as it is sent."""
    answer = client.get(name, headers={"accept-encoding": encoding})
    assert answer.status_code == 200, name
    assert re.search(r"\.[0-9a-f]{12}\.\w+$", name), name
    assert "immutable" in answer["Cache-Control"], name
    return b"".join(answer)


def files_of(client: Client, page: str) -> set[str]:
    """The addresses of the styles and scripts that a page names."""
    text = client.get(page).content.decode()
    return set(re.findall(r'<(?:link|script)[^>]*(?:href|src)="(/static/[^"]+)"', text))
