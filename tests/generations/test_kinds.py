"""The kinds of generations that the apps name."""

from __future__ import annotations

from importlib import import_module

import pytest
from django.apps import apps

from inference_site.runs.kinds import GenerationKind, kind_of


@pytest.mark.parametrize("label", ["completions", "responses_api"])
def test_an_app_names_all_its_kinds(label: str) -> None:
    config = apps.get_app_config(label)
    assert set(config.kinds) == import_module(f"{config.name}.kinds").KINDS.keys()  # type: ignore[attr-defined]
    assert all(isinstance(kind_of(name), GenerationKind) for name in config.kinds)  # type: ignore[attr-defined]


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(KeyError):
        kind_of("none")
