"""Requests and deltas are values: nobody who gets one can change it for the others."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from inference_site.core.domain import deltas, messages, request

VALUES = [
    kind
    for module in (deltas, messages, request, request)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", VALUES)
def test_values_cannot_be_changed(kind: type) -> None:
    value: object = object.__new__(kind)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)
        assert not str(field.type).startswith(("list", "set[", "bytearray")), field
