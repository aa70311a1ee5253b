"""How declared types become components of the OpenAPI document."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import create_model

from inference_site.gateway.api import openapi
from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.api.schema import documented


class Sent(WireObject):
    """What is sent."""

    always: int
    fixed: str = "fixed"
    perhaps: str | None = None


class Asked(WireRequest):
    """What is asked."""

    needed: str
    chosen: int = 3


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The components that declarations come to."""

    def made_of(*declarations: documented) -> dict[str, Any]:
        monkeypatch.setattr(openapi, "declared", list(declarations))
        made: dict[str, Any] = openapi._schemas.__wrapped__()[1]
        return made

    return made_of


def test_what_is_sent_lacks_at_most_what_may_be_none(components: Any) -> None:
    schema = components(documented(answer=Sent))["Sent"]
    assert schema["required"] == ["always", "fixed"]
    assert schema["additionalProperties"] is False
    assert schema["description"] == "What is sent."


def test_what_is_asked_may_lack_what_has_a_default(components: Any) -> None:
    schema = components(documented(answer=Sent, body=Asked))["Asked"]
    assert schema["required"] == ["needed"]
    assert schema["additionalProperties"] is True


def test_models_of_one_name_are_components_of_different_names(components: Any) -> None:
    others = create_model("Sent", __base__=WireObject, __module__="other", text=(str, ...))
    made = components(documented(answer=Sent, event=others), documented(answer=Sent | others))
    names = {name for name, schema in made.items() if schema["title"] == "Sent"}
    assert len(names) == 2


def test_what_fails_is_in_the_envelope(components: Any) -> None:
    assert {"ErrorEnvelope", "ErrorDetail"} <= components(documented(answer=Sent)).keys()
