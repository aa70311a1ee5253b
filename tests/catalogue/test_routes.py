"""Routes: what an entry may say, and how targets are drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.catalogue import Catalogue
from inference_site.catalogue.models_file import Route, Target, read_models_and_routes
from inference_site.core.domain.model_spec import ModelSpec

ONE, TWO, THREE = (ModelSpec(name, "scripted") for name in ("one", "two", "three"))
MODELS = """
models:
  one: {engine: scripted, aliases: [first]}
  two: {engine: scripted, context_length: 100}
"""


def read(folder: Path, entries: str) -> Catalogue:
    path = folder / "models.yaml"
    path.write_text(MODELS + entries)
    specs, routes = read_models_and_routes(path)
    return Catalogue(specs, routes=routes)


def test_a_route_leads_to_models_of_the_file_and_is_none(tmp_path: Path) -> None:
    """It may come before them."""
    entry = "route: [{model: one, weight: 3}, {model: two}], fallback: [two], max_queue_s: 1.5"
    known = read(tmp_path, f"  chat: {{{entry}}}\n  last: {{engine: scripted}}\n")
    route = known.named("Chat:latest")
    assert isinstance(route, Route)
    assert [(one.spec.id, one.weight) for one in route.targets] == [("one", 3), ("two", 1)]
    assert [one.context_length for one in route.targets] == [2**20, 100]
    assert [one.spec.id for one in route.fallback] == ["two"]
    assert route.max_queue_s == 1.5
    assert known.find("chat") is None
    assert list(known.models) == ["one", "two", "last"]
    assert [one.id for one in known.listed_routes("any")] == ["chat"]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("route: [{model: none}]", ".route.0.model: unknown model 'none'"),
        ("route: [{model: first}]", ".route.0.model: unknown model 'first'"),
        ("route: [{model: chat}]", ".route.0.model: 'chat' is a route"),
        ("route: [{model: one}], fallback: [other]", ".fallback.0: 'other' is a route"),
        ("route: [{model: one}], fallback: [x]", ".fallback.0: unknown model 'x'"),
        ("route: [{model: one}, {model: one}]", ".route.1.model: 'one' is there twice"),
        ("route: []", ".route: it has no targets"),
        ("route: {model: one}", ".route: must be a list"),
        ("route: [one]", ".route.0: must be a mapping"),
        ("route: [{model: one, weight: 0}]", ".route: all weights are zero"),
        ("route: [{model: one, weight: -1}]", ".route.0.weight: Input should be greater"),
        ("route: [{model: one, weight: .nan}]", ".route.0.weight: Input should be a finite"),
        ("route: [{weight: 1}]", ".route.0.model: it is missing"),
        ("route: [{model: one}], max_queue_s: -1", ".max_queue_s: Input should be greater"),
        ("route: [{model: one}], slots: 4", ".slots: unknown key"),
        ("route: ~", ".route: it is empty"),
        ("fallback: [one]", ".fallback: unknown key"),
    ],
)
def test_a_wrong_route_is_told_with_its_line(tmp_path: Path, entry: str, told: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        read(tmp_path, f"  other: {{route: [{{model: one}}]}}\n  chat: {{{entry}}}\n")
    assert str(caught.value).startswith(f"{tmp_path}/models.yaml:6: models.chat{told}")


@pytest.mark.parametrize("name", ["first", "ONE", "two"])
def test_a_route_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"have one name|there twice"):
        read(tmp_path, f"  {name}: {{route: [{{model: two}}]}}\n")


def test_a_route_goes_before_what_is_no_entry_of_the_file() -> None:
    route = Route("chat", (Target(ONE, 1, 1.0),))
    chat = replace(TWO, id="chat")
    known = Catalogue([ONE], found=[chat], shipped=[chat], routes=[route])
    assert not known.update([chat, replace(THREE, aliases=("chat",))])
    assert known.named("chat") is route
    assert list(known.models) == ["one"]


def drawn(route: Route, keys: int = 4000) -> list[str]:
    return [route.candidates("p", str(key))[0].spec.id for key in range(keys)]


def test_weights_are_shares_and_a_key_keeps_its_target() -> None:
    targets = (Target(ONE, 1, 70.0), Target(TWO, 1, 30.0), Target(THREE, 1, 0.0))
    route = Route("r", targets)
    found = drawn(route)
    assert found == drawn(route)
    shares = Counter(found)
    assert shares["one"] == pytest.approx(2800, abs=100)
    assert shares["three"] == 0
    more = drawn(replace(route, targets=(*targets[:2], Target(THREE, 1, 100.0))))
    moved = Counter((a, b) for a, b in zip(found, more, strict=True) if a != b)
    assert {b for _, b in moved} == {"three"}
    assert moved.total() == pytest.approx(2000, abs=150)


def test_without_a_key_the_model_of_the_turn_before_goes_on() -> None:
    route = Route("r", (Target(ONE, 1, 1.0), Target(TWO, 1, 1.0)), (Target(THREE, 1),))
    assert {route.candidates("p", earlier="two")[0].spec.id for _ in range(30)} == {"two"}
    assert {route.candidates("p", earlier="three")[0].spec.id for _ in range(99)} == {"one", "two"}


def test_models_of_other_projects_are_left_out() -> None:
    mine = replace(ONE, projects=("p",))
    route = Route("r", (Target(mine, 1, 1.0), Target(TWO, 1, 0.0)), (Target(mine, 1),))
    assert [one.spec.id for one in route.candidates("p")] == ["one"]
    assert not route.is_for("q")
