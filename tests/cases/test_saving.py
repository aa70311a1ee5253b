"""Saving the answers of a list as cases."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from inference_site.accounts.models import ApiKey
from inference_site.cases.models import Case
from tests.responses_api.chains import Chain

pytestmark = pytest.mark.django_db
LIST = "/admin/responses_api/storedresponse/"


def test_what_the_list_showed_is_saved_whatever_came_meanwhile(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    shown = [Chain(api_key[0]).turn(f"question {n}", f"answer {n}") for n in range(2)]
    page = admin.get(LIST).content.decode()
    form = {"set": "seen", "shown": re.findall(r'name="shown" value="(\d+)"', page)}
    Chain(api_key[0]).turn("a later question", "a later answer")
    assert admin.post(f"{LIST}cases/", form).status_code == 302
    sources = list(Case.objects.values_list("source", flat=True))
    assert sources == [one.public_id for one in shown]
