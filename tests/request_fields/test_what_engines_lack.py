"""One rule for the fields that an engine does not have, as docs/api.md tells it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from completions.mapping import to_generation_request
from completions.wire.chat import ChatCompletionRequest
from inference_site.catalogue.engines.openai_upstream import FLAVORS
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.request_fields.capabilities import HINTS, RESTRICTIONS, ignored_fields
from inference_site.gateway.submission.model_access import ResolvedModel
from tests.served_stack import ROOT

OWN = {f"the engine {name}": ModelSpec("m", name) for name in ("llama_cpp", "ctransformers")}
ALL = {*FLAVORS, *OWN}
SENT: dict[str, Any] = {
    "min_tokens": 3,
    "allowed_token_ids": [1],
    "bad_words": ["no"],
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": -1,
    "structured_outputs.structural_tag": {"structured_outputs": {"structural_tag": {"a": 1}}},
    "logprob_token_ids": {"logprob_token_ids": [5], "logprobs": True},
    "logit_bias": {"5": -100},
    "add_generation_prompt": False,
    "cache_salt": "salt",
    "priority": 1,
    "vllm_xargs": {"a": 1},
    "ignore_eos": True,
    "min_p": 0.1,
    "dry_multiplier": 0.8,
}


def rows() -> dict[str, tuple[set[str], str]]:
    """The table: who honours each field, and what becomes of it elsewhere."""
    page = (ROOT / "docs" / "api.md").read_text()
    table = page.partition("| field | honoured by | elsewhere |")[2].partition("\n\n")[0]
    found = {}
    for line in table.strip().splitlines()[1:]:
        field, by, elsewhere = (cell.strip() for cell in line.strip("|").split("|"))
        named = set(re.findall(r"(?<!engine )`([a-z_]+)`", by))
        named |= {name for name in OWN if name in by.replace("`", "") or "own engines" in by}
        honoured = ALL - named if by.startswith("all but") else named
        name = re.findall("`([a-z_.]+)[`:]", field)[0]
        found[name] = (honoured, elsewhere)
    return found


def outcome(kind: str, body: dict[str, Any]) -> str:
    """What becomes of a chat with these fields."""
    options = {"base_url": "http://h/v1", "flavor": kind}
    spec = OWN.get(kind) or ModelSpec("m", "openai_upstream", options=options)
    own = model_capabilities(spec) if kind in OWN else frozenset[str]()
    model = ResolvedModel(spec, own | {"chat", "grammar", "logprobs", "response_prefix"})
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}
    request = ChatCompletionRequest.model_validate(asked)
    try:
        made = to_generation_request(request, model)
    except InvalidRequestError as exc:
        return f"{'400' if exc.code == 'unsupported_parameter' else exc.code} {exc.param}"
    return ",".join(ignored_fields(model, request, made))


def test_the_page_has_every_field_of_the_rule() -> None:
    told = rows()
    assert set(told) == set(SENT)
    assert {bound.field for bound in RESTRICTIONS} == {
        n for n, (_, how) in told.items() if how == "400"
    }
    assert set(HINTS) <= {name for name, (_, how) in told.items() if how == "named"}


@pytest.mark.parametrize("field", SENT)
def test_what_binds_is_refused_and_what_tunes_is_named(field: str) -> None:
    honoured, elsewhere = rows()[field]
    value = SENT[field]
    body = value if "." in field or field == "logprob_token_ids" else {field: value}
    for kind in ALL:
        expected = f"400 {field}" if elsewhere == "400" else field
        assert outcome(kind, body) == ("" if kind in honoured else expected), kind


def test_a_bias_that_forbids_nothing_only_tunes() -> None:
    assert outcome("ollama", {"logit_bias": {"5": -5}}) == "logit_bias"


@pytest.mark.parametrize("kind", sorted(ALL))
def test_a_constrained_answer_ends_and_names_ignore_eos_once(kind: str) -> None:
    body = {"response_format": {"type": "json_object"}, "ignore_eos": True}
    assert outcome(kind, body) == "ignore_eos"
