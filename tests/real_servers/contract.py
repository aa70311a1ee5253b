"""What a model is asked through the product, by the official client, whatever server runs it.

A check either holds, or is refused by the product as not supported, or fails with the reason.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai

from tests.served_stack import ServedStack, wait_until

CONTEXT_LENGTH, SLOTS = 2048, 4
CAPITAL, COUNT = "What is the capital of Japan?", "Count from 1 to 20."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
WILD: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16}
_SEES_CANCEL_S = 10.0
_REASON_LENGTH = 160
_HEADER = "x-unsupported-params"

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY},
}


class NotSupportedError(Exception):
    """The product refuses a field for this model, or names it as left out."""


class Site:
    """A model of a running stack."""

    def __init__(self, stack: ServedStack, model: str, embedding: str | None = None) -> None:
        self.stack, self.model, self.embedding = stack, model, embedding
        self.client = stack.client().with_options(timeout=300)

    def chat(self, text: str = CAPITAL, **fields: Any) -> Any:
        """Return the answer, or its stream."""
        messages = [{"role": "user", "content": text}]
        return self._create(self.client.chat.completions, messages=messages, **fields)

    def complete(self, prompt: str = "One, two, three,", **fields: Any) -> Any:
        """Return the completion, or its stream."""
        return self._create(self.client.completions, prompt=prompt, **fields)

    def text(self, text: str = CAPITAL, **fields: Any) -> str:
        """Return the text of a greedy answer, unless the fields say otherwise."""
        found: str = self.chat(text, **{**GREEDY, **fields}).choices[0].message.content or ""
        return found

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return what a path of no client answers."""
        with self.stack.http() as http:
            answer = http.post(path, json={"model": self.model, **body})
        found: dict[str, Any] = answer.json()
        if found.get("error"):
            _raise_if_unsupported(found["error"].get("code"), str(found["error"]["message"]))
        assert answer.status_code == httpx.codes.OK, f"{path}: {answer.text}"
        return found

    def _create(self, endpoint: Any, **fields: Any) -> Any:
        known = inspect.signature(endpoint.create).parameters
        named = {name: value for name, value in fields.items() if name in known}
        more = {name: value for name, value in fields.items() if name not in known}
        try:
            raw = endpoint.with_raw_response.create(model=self.model, extra_body=more, **named)
        except openai.BadRequestError as exc:
            _raise_if_unsupported(exc.code, exc.message)
            raise
        left_out = {name.strip() for name in raw.headers.get(_HEADER, "").split(",")}
        if left_out & fields.keys():
            raise NotSupportedError(f"left out: {', '.join(sorted(left_out))}")
        return raw.parse()


def _raise_if_unsupported(code: str | None, message: str) -> None:
    refused = code in ("unsupported_model", "unsupported_parameter", "unsupported_value")
    if refused or "knows no constraints of the type" in message:
        raise NotSupportedError(message)


@dataclass(frozen=True)
class Check:
    """A row of the page. ``needs`` is the capability or field that a flavor declares for it."""

    row: str
    needs: str
    run: Callable[[Site], None]


CHECKS: list[Check] = []


def check(row: str, needs: str) -> Callable[[Callable[[Site], None]], Callable[[Site], None]]:
    """Make a function a check."""

    def add(run: Callable[[Site], None]) -> Callable[[Site], None]:
        CHECKS.append(Check(row, needs, run))
        return run

    return add


def seen(check: Check, site: Site) -> str:
    """Return what is seen: ``✓``, ``–`` for a refusal, or ``✗`` with the reason."""
    try:
        check.run(site)
    except NotSupportedError:
        return "–"
    except (AssertionError, openai.OpenAIError, httpx.HTTPError, LookupError, ValueError) as exc:
        return f"✗ {' '.join(str(exc).split())[:_REASON_LENGTH] or type(exc).__name__}"
    return "✓"


def _streamed(chunks: Any) -> tuple[str, str | None, Any]:
    """Return the text of a stream of chats, how it ended, and its usage."""
    text, finish, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@check("chat, whole and streamed, with the same usage", "chat")
def _chat(site: Site) -> None:
    whole = site.chat(COUNT, **GREEDY)
    text, finish, usage = _streamed(site.chat(COUNT, **GREEDY, **_STREAM))
    assert text, "no text"
    assert (text, finish) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert usage.completion_tokens == whole.usage.completion_tokens <= GREEDY["max_tokens"]


@check("completions, whole and streamed", "completions")
def _completions(site: Site) -> None:
    whole = site.complete(**GREEDY)
    parts = [
        choice.text for chunk in site.complete(**GREEDY, stream=True) for choice in chunk.choices
    ]
    assert "".join(parts) == whole.choices[0].text != ""
    assert len(parts) > 1


@check("stop texts", "stop")
def _stop(site: Site) -> None:
    whole = site.text(COUNT)
    stop = whole[7:10]
    answer = site.chat(COUNT, **GREEDY, stop=[stop]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


@check("a limit of tokens", "max_tokens")
def _limit(site: Site) -> None:
    answer = site.chat("Tell me a long story.", temperature=0, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


@check("a seed", "seed")
def _seed(site: Site) -> None:
    assert site.text(**WILD, seed=7) == site.text(**WILD, seed=7)


@check(f"{SLOTS * 2} requests at once", "chat")
def _at_once(site: Site) -> None:
    with ThreadPoolExecutor(SLOTS * 2) as pool:
        asked = partial(site.text, COUNT)
        answers = [future.result() for future in [pool.submit(asked) for _ in range(SLOTS * 2)]]
    assert all("2" in answer and "3" in answer for answer in answers), str(answers)


@check("log probabilities", "logprobs")
def _logprobs(site: Site) -> None:
    choice = site.chat(**GREEDY, logprobs=True, top_logprobs=2).choices[0]
    told = choice.logprobs.content
    texts = [each.token for each in told]
    # vLLM tells of the token that ends the answer, too.
    assert choice.message.content in ("".join(texts), "".join(texts[:-1]))
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in told)
    completed = site.complete(**GREEDY, logprobs=2).choices[0]
    assert "".join(completed.logprobs.tokens) == completed.text


@check("log probabilities of the prompt", "prompt_logprobs")
def _prompt_logprobs(site: Site) -> None:
    prompt = "The capital of France is Paris."
    answer = site.complete(prompt, echo=True, logprobs=1, max_tokens=0)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == answer.usage.prompt_tokens
    assert all(value < 0 for value in told.token_logprobs[1:])


@check("ids of tokens, and a chat's prompt", "token_ids")
def _token_ids(site: Site) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": CAPITAL}], **GREEDY}
    answer = site.post(
        "/v1/chat/completions", **asked, return_token_ids=True, prompt_logprobs=1, logprobs=True
    )
    rendered = site.post("/v1/chat/render", messages=asked["messages"])["tokens"]
    assert answer["prompt_token_ids"] == rendered
    scored = answer["prompt_logprobs"]
    assert scored[0] is None
    assert all(str(token) in entry for token, entry in zip(rendered[1:], scored[1:], strict=True))
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    said = site.post("/v1/detokenize", tokens=choice["token_ids"])["prompt"]
    assert choice["message"]["content"].strip() in said
    named = site.chat(**GREEDY, logprobs=True, return_tokens_as_token_ids=True)
    assert all(e.token.startswith("token_id:") for e in named.choices[0].logprobs.content)


@check("`logprob_token_ids`", "logprob_token_ids")
def _logprob_token_ids(site: Site) -> None:
    asked: dict[str, Any] = {"logprobs": True, "logprob_token_ids": [1, 2, 3]}
    answer = site.chat(temperature=0, max_tokens=2, **asked)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) >= 3


@check("`n`", "choices")
def _choices(site: Site) -> None:
    answer = site.chat(temperature=1, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)
    assert answer.usage.completion_tokens > 2


@check("JSON objects", "json_object")
def _json_object(site: Site) -> None:
    asked = "Return a JSON object with the name of one city."
    choice = site.chat(
        asked, temperature=0, max_tokens=60, response_format={"type": "json_object"}
    ).choices[0]
    text = choice.message.content.strip()
    assert text.startswith("{"), text
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


@check("JSON schemas", "json_schema")
def _json_schema(site: Site) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    _is_city(site.text("Name a city.", max_tokens=60, response_format=form))


@check("GBNF", "gbnf")
def _gbnf(site: Site) -> None:
    assert site.text(grammar={"type": "gbnf", "value": 'root ::= "yes" | "no"'}) in ("yes", "no")


@check("regex", "regex")
def _regex(site: Site) -> None:
    assert re.fullmatch(
        "[0-9]{3}-[ab]", site.text(grammar={"type": "regex", "value": r"[0-9]{3}-[ab]"})
    )


@check("Lark", "lark")
def _lark(site: Site) -> None:
    assert site.text(grammar={"type": "lark", "value": 'start: "yes" | "no"'}) in ("yes", "no")


@check("a forced call matches its schema", "tools")
def _forced(site: Site) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        fields = {"temperature": 0, "max_tokens": 80, "tools": [TOOL], "tool_choice": choice}
        [answer] = site.chat("Is it raining in Oslo?", **fields).choices
        [call] = answer.message.tool_calls
        assert call.function.name == "weather"
        _is_city(call.function.arguments)
        pieces = [
            piece.function.arguments or ""
            for chunk in site.chat("Is it raining in Oslo?", **fields, stream=True)
            for each in chunk.choices
            for piece in each.delta.tool_calls or ()
        ]
        _is_city("".join(pieces))


def _is_city(text: str) -> None:
    assert json.loads(text) in ({"city": "Paris"}, {"city": "Rome"}), text


def _is_greedy(**fields: Any) -> Callable[[Site], None]:
    """The fields leave one token to choose, so that chance does not matter."""

    def run(site: Site) -> None:
        one, other = (site.text(**{**WILD, "seed": seed}, **fields) for seed in (1, 2))
        assert one == other != ""

    return run


def _changes(text: str, **fields: Any) -> Callable[[Site], None]:
    """The fields change the answer."""

    def run(site: Site) -> None:
        assert site.text(text, **fields) != site.text(text)

    return run


def _is_accepted(**fields: Any) -> Callable[[Site], None]:
    """The fields are accepted; what they do cannot be seen with these models."""

    def run(site: Site) -> None:
        assert site.text(**fields)

    return run


REPEAT = "Write the word cat eight times: cat cat cat cat"
_DRY = {"dry_multiplier": 5.0, "dry_base": 4.0, "dry_allowed_length": 1}
CHECKS += [
    Check("`top_k`", "top_k", _is_greedy(top_k=1)),
    Check("`min_p`", "min_p", _is_greedy(min_p=1.0)),
    Check("`repetition_penalty`", "repetition_penalty", _changes(REPEAT, repetition_penalty=2.0)),
    Check("DRY", "dry_multiplier", _changes(REPEAT, **_DRY)),
    Check("XTC", "xtc_probability", _changes(COUNT, xtc_probability=1.0, xtc_threshold=0.001)),
    Check("mirostat", "mirostat", _is_greedy(mirostat=2, mirostat_tau=0.001)),
    Check("`typical_p`", "typical_p", _is_accepted(typical_p=0.5, temperature=0.5)),
]


@check("`ignore_eos`", "ignore_eos")
def _ignore_eos(site: Site) -> None:
    answer = site.chat("Say yes.", temperature=0, max_tokens=60, ignore_eos=True)
    assert answer.usage.completion_tokens == 60
    assert answer.choices[0].finish_reason == "length"


@check("`logit_bias`", "logit_bias")
def _logit_bias(site: Site) -> None:
    whole = site.text()
    try:
        tokens = _tokens(site, whole)[:3]
    except NotSupportedError:  # Which token is which cannot be known: that it is accepted is all.
        assert site.text(logit_bias={"16": -100})
    else:
        assert site.text(logit_bias={str(token): -100 for token in tokens}) != whole


@check("`stop_token_ids`", "stop_token_ids")
def _stop_token_ids(site: Site) -> None:
    whole = site.text()
    end = _tokens(site, whole)[3]
    cut = site.text(stop_token_ids=[end])
    assert whole.startswith(cut)
    assert len(cut) < len(whole)


def _tokens(site: Site, text: str) -> list[int]:
    found = site.post("/v1/tokenize", prompt=text, add_special_tokens=False)
    return [int(token) for token in found["tokens"]]


CHECKS += [
    Check(
        "template variables (accepted)",
        "chat_template_kwargs",
        _is_accepted(chat_template_kwargs={"enable_thinking": False}),
    ),
    Check("`reasoning_budget` (accepted)", "reasoning_budget", _is_accepted(reasoning_budget=8)),
]


@check("`response_prefix`", "response_prefix")
def _prefix(site: Site) -> None:
    whole = site.text()
    at = whole.index(" ", 12)
    start, rest = whole[:at], whole[at:]
    found = site.text(response_prefix=start)
    assert found.startswith(rest[:8]), f"{found!r} after {start!r}, not {rest!r}"


@check("`suffix`", "suffix")
def _suffix(site: Site) -> None:
    assert site.complete("def add(a, b):\n    return", suffix="\n", max_tokens=8).choices[0].text


@check("tokens, and back", "tokens")
def _tokenize(site: Site) -> None:
    text = "Hello, world!"
    found = site.post("/v1/tokenize", prompt=text)
    assert found["count"] == site.complete(text, max_tokens=1).usage.prompt_tokens
    assert site.post("/v1/detokenize", tokens=found["tokens"])["prompt"].endswith(text)


@check("prompts of chats", "render")
def _render(site: Site) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": CAPITAL}]}
    found = site.post("/v1/chat/render", **asked)
    assert CAPITAL in found["prompt"]
    assert found["count"] == site.chat(CAPITAL, max_tokens=1).usage.prompt_tokens


@check("token counts of responses", "tokens")
def _count(site: Site) -> None:
    found = site.post("/v1/responses/input_tokens", input=CAPITAL)
    assert found["input_tokens"] == site.chat(CAPITAL, max_tokens=1).usage.prompt_tokens


@check("responses, and a chain of them", "chat")
def _responses(site: Site) -> None:
    create = partial(site.client.responses.create, model=site.model, temperature=0)
    first = create(input="My name is Ann.", max_output_tokens=24)
    second = create(input=CAPITAL, previous_response_id=first.id, max_output_tokens=24)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert "Tokyo" in second.output_text, second.output_text


def _left(site: Site) -> tuple[Mapping[str, Any], int]:
    """Leave a stream after three pieces; return its row and how many pieces have come."""
    stream = site.chat("Tell me a very long story.", temperature=0, max_tokens=900, stream=True)
    pieces, public_id = 0, ""
    for chunk in stream:
        public_id = chunk.id
        pieces += bool(chunk.choices and chunk.choices[0].delta.content)
        if pieces >= 3:
            break
    stream.close()
    ended = ("cancelled", "completed", "failed", "incomplete")
    wait_until(
        lambda: site.stack.row(public_id)["status"] in ended, _SEES_CANCEL_S, "the run's end"
    )
    return site.stack.row(public_id), pieces


@check("a client that leaves ends its run", "chat")
def _cancel(site: Site) -> None:
    row, _ = _left(site)
    assert row["status"] == "cancelled"
    assert 0 < row["output_tokens"] < 300
    assert site.text()


@check("exact usage of cancelled requests", "running_usage")
def _exact(site: Site) -> None:
    whole = site.chat("Tell me a very long story.", temperature=0, max_tokens=1)
    row, pieces = _left(site)
    assert row["input_tokens"] == whole.usage.prompt_tokens, f"{row['input_tokens']} of the prompt"
    assert row["output_tokens"] >= pieces


@check("a prompt that is too long: `context_length_exceeded`", "chat")
def _overflow(site: Site) -> None:
    error: openai.BadRequestError | None = None
    try:
        site.chat("word " * (CONTEXT_LENGTH + CONTEXT_LENGTH // 4), max_tokens=8)
    except openai.BadRequestError as exc:
        error = exc
    assert error is not None, "it was answered"
    assert error.code == "context_length_exceeded", f"{error.code}: {error.message}"


@check("embeddings", "embeddings")
def _embeddings(site: Site) -> None:
    if site.embedding is None:
        raise NotSupportedError("no model that embeds is run")
    made = site.client.embeddings.create(model=site.embedding, input=["one", "two"])
    one, two = (each.embedding for each in made.data)
    assert len(one) == len(two) > 8
    assert one != two
