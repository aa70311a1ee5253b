"""docs/engines.md says of the engines what they say of themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.openai_upstream import FLAVORS
from inference_site.catalogue.engines.registry import ENGINES, model_capabilities
from inference_site.core.domain.model_spec import ModelSpec
from tests.real_servers import page as seen_page
from tests.tiny_ggml import CONTEXT, write_ggml
from worker.engines.chat.template import FAMILIES

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
OPTIONS: dict[str, dict[str, Any]] = {
    "embedding": {"embedding": "mean"},
    "matryoshka": {"embedding": "mean", "matryoshka": True},
    "embedding: rank": {"embedding": "rank"},
    "guard": {"guard": "llama_guard"},
    "fim_tokens": {"fim_tokens": ["a", "b", "c"]},
    "mmproj": {"mmproj": "p.gguf"},
    "modalities": {"mmproj": "p.gguf", "modalities": ["audio"]},
}


def table() -> dict[str, dict[str, str]]:
    """What the document says of each engine, by the capability."""
    lines = DOCUMENT[DOCUMENT.index("| capability |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]
    header, _rule, *body = rows
    engines = {name: {row[0]: row[at] for row in body} for at, name in enumerate(header) if at}
    return {name: {what: cell for what, cell in of.items() if cell} for name, of in engines.items()}


def test_every_engine_has_its_column() -> None:
    assert table().keys() == ENGINES.keys()


def test_llama_cpp_can_do_what_its_column_says() -> None:
    told = table()["llama_cpp"]
    always = {what for what, cell in told.items() if cell == "✓"}
    assert model_capabilities(ModelSpec("m", "llama_cpp", DEMO_FILE)) == always
    for what, option in told.items():
        if option in OPTIONS:
            spec = ModelSpec("m", "llama_cpp", DEMO_FILE, options=OPTIONS[option])
            assert what in model_capabilities(spec)
        elif option == "lora_adapters":
            spec = ModelSpec("m", "llama_cpp", DEMO_FILE, lora_adapters={"a": DEMO_FILE})
            assert what in model_capabilities(spec)
        else:
            assert option == "✓"


def test_ctransformers_can_do_what_its_column_says(tmp_path: Path) -> None:
    told = table()["ctransformers"]
    path = tmp_path / "gpt2.bin"
    write_ggml(path, "gpt2")
    bare = ModelSpec("m", "ctransformers", path, context_length=CONTEXT)
    assert model_capabilities(bare) == {what for what, cell in told.items() if cell == "✓"}
    assert model_capabilities(ModelSpec("m", "ctransformers", DEMO_FILE)) == told.keys()


def test_scripted_can_do_what_its_column_says() -> None:
    assert model_capabilities(ModelSpec("m", "scripted")) == table()["scripted"].keys()


@pytest.mark.parametrize("engine", ["openai_upstream", "command"])
def test_servers_can_do_what_their_column_says(engine: str) -> None:
    told = table()[engine]
    of_flavors = frozenset().union(
        *(model_capabilities(ModelSpec("m", engine, options={"flavor": f})) for f in FLAVORS)
    )
    assert of_flavors == {what for what, cell in told.items() if cell == "flavor"}
    named = [what for what, cell in told.items() if cell == "named"]
    spec = ModelSpec("m", engine, options={"capabilities": named})
    assert model_capabilities(spec) == set(named)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_templates_are_told(family: str) -> None:
    assert re.search(rf"`{family}`", DOCUMENT)


def test_page_of_what_was_seen_is_that_of_what_is_kept() -> None:
    assert seen_page.PAGE.read_text(encoding="utf-8") == seen_page.page(seen_page.read())


def test_row_that_was_promised_and_refused_or_has_failed_is_a_difference() -> None:
    rows = {"a": "✓", "b": "–", "c": "–", "d": "✗ why", "e": "✓"}
    told = seen_page.differences({"rows": rows, "promised": ["a", "b", "d"]})
    assert dict(told) == {"b": "promised, but refused", "d": "why"}
