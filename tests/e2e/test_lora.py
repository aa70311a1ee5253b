"""LoRA adapters: applied by name, for one request alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from inference_site.accounts.models import Scope
from tests.e2e.keys import make_key
from tests.served_stack import ServedStack, wait_until
from tests.tiny_vision import write_projector
from tests.tiny_weights import write_adapter, write_misfit, write_stranger

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def told(client: openai.OpenAI, lora: Any = None, model: str = "tuned") -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=STORY,
        max_tokens=20,
        extra_body={"lora": lora, "temperature": 0, "presence_penalty": 0},
    )
    return completion.choices[0].message.content or ""


def long_story(client: openai.OpenAI, lora: Any) -> tuple[str, str]:
    """The id and the text of an answer that takes a while."""
    completion = client.chat.completions.create(
        model="tuned",
        messages=STORY,
        max_tokens=200,
        extra_body={"lora": lora, "temperature": 0, "ignore_eos": True},
    )
    return completion.id, completion.choices[0].message.content or ""


def scaled(name: str, scale: float) -> dict[str, Any]:
    return {"name": name, "scale": scale}


def test_each_adapter_changes_the_answer_in_its_own_way(client: openai.OpenAI) -> None:
    plain = told(client, model="demo")
    assert told(client) == plain
    one, two = told(client, "one"), told(client, "two")
    both = told(client, [{"name": "one"}, {"name": "two"}])
    assert len({plain, one, two, both}) == 4
    assert told(client) == plain  # It was for those requests alone.


def test_scale_says_how_much_of_it_is_applied(client: openai.OpenAI) -> None:
    whole = told(client, "one")
    assert told(client, [{"name": "one"}]) == told(client, [scaled("one", 1.0)]) == whole
    assert told(client, [scaled("one", 0.0)]) == told(client, []) == told(client)
    assert told(client, [scaled("one", 0.5)]) not in (whole, told(client))
    assert told(client, [scaled("one", 1.0), scaled("two", 0.0)]) == whole


def test_requests_with_different_adapters_run_at_once(
    client: openai.OpenAI, stack: ServedStack
) -> None:
    """Each says what it says alone, while the others are running."""
    kinds: list[Any] = [None, "one", "two", [scaled("one", 0.5)]]
    alone = [long_story(client, lora)[1] for lora in kinds]
    assert len(set(alone)) == len(kinds)
    gate = threading.Barrier(len(kinds))

    def among_others(lora: Any) -> tuple[str, str]:
        gate.wait(60)
        return long_story(client, lora)

    def were_at_once() -> bool:
        """On a busy machine one may have ended before another is claimed."""
        with ThreadPoolExecutor(len(kinds)) as pool:
            told_at_once = list(pool.map(among_others, kinds))
        assert [text for _id, text in told_at_once] == alone
        rows = [stack.row(public_id) for public_id, _text in told_at_once]
        assert len({row["worker"] for row in rows}) == 1
        return bool(
            max(row["claimed_at"] for row in rows) < min(row["finished_at"] for row in rows)
        )

    wait_until(were_at_once, 60, "four have run at once")


def test_adapter_of_the_entry_is_a_name_of_its_model_with_it(client: openai.OpenAI) -> None:
    assert told(client, model="one") == told(client, "one") != told(client)


def test_completions_have_adapters_too(client: openai.OpenAI) -> None:
    def completed(lora: Any) -> str:
        fields = {"lora": lora, "temperature": 0}
        answer = client.completions.create(
            model="tuned", prompt="Once upon a time", max_tokens=8, extra_body=fields
        )
        return answer.choices[0].text

    assert completed("one") != completed(None)


@pytest.mark.parametrize(
    ("model", "lora", "param", "code"),
    [
        ("tuned", "ghost", "lora", None),
        ("tuned", [scaled("one", 1.0), scaled("ghost", 1.0)], "lora", None),
        ("tuned", [{"scale": 1.0}], "lora[0].name", "missing_required_parameter"),
        ("tuned", [scaled("one", "much")], "lora[0].scale", "invalid_type"),  # type: ignore[arg-type]  # Wrong on purpose.
        ("tuned", 5, "lora", "invalid_type"),
        ("demo", "one", "lora", "unsupported_parameter"),
        ("scripted", "one", "lora", "unsupported_parameter"),
    ],
)
def test_adapter_that_is_not_there_is_400(
    client: openai.OpenAI, model: str, lora: Any, param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        told(client, lora, model)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.fixture
def operator(stack: ServedStack) -> Iterator[httpx.Client]:
    """A client whose key may load models and adapters."""
    key = make_key(stack, Scope.INFERENCE.value, Scope.MODELS.value)
    with httpx.Client(
        base_url=stack.url, headers={"Authorization": f"Bearer {key.secret}"}, timeout=60
    ) as plain:
        yield plain


def adapters_of(http: httpx.Client, model: str) -> dict[str, float]:
    listed = http.get("/lora-adapters", params={"model": model}).json()
    assert [entry["id"] for entry in listed] == list(range(len(listed)))
    return {entry["name"]: entry["scale"] for entry in listed}


def wait_until_reloaded(
    client: openai.OpenAI, stack: ServedStack, model: str, before: psutil.Process
) -> None:
    """Return when the model is served, and by another process than ``before``.

    That one goes on taking requests until it is told to end.
    """

    def is_reloaded() -> bool:
        try:
            client.chat.completions.create(model=model, messages=STORY, max_tokens=1)
        except openai.InternalServerError:  # It is being loaded.
            return False
        return not before.is_running()

    wait_until(is_reloaded, 120, "the model to be loaded anew")


def test_adapter_is_added_and_removed_while_the_site_runs(
    client: openai.OpenAI, operator: httpx.Client, stack: ServedStack
) -> None:
    write_adapter(stack.data_dir / "models" / "late" / "late.gguf", seed=7)
    late = {"lora_name": "late", "lora_path": "late/late.gguf", "model": "hooked-demo"}
    plain, before = told(client, None, "hooked-demo"), stack.server_of("hooked-demo")
    with pytest.raises(openai.NotFoundError):
        told(client, model="late")

    loaded = operator.post("/v1/load_lora_adapter", json=late)
    assert (loaded.status_code, loaded.json()["model"]) == (200, "hooked-demo")
    assert len(loaded.json()["workers"]) == 1
    assert operator.post("/v1/load_lora_adapter", json=late).status_code == 409
    wait_until_reloaded(client, stack, "hooked-demo", before)
    adapted = told(client, "late", "hooked-demo")
    assert adapted != plain
    assert told(client, [], "hooked-demo") == told(client, None, "hooked-demo") == plain
    assert told(client, model="late") == adapted  # As clients of vLLM ask for it.
    assert told(client, [{"id": 0, "scale": 1.0}], "hooked-demo") == adapted
    assert client.models.retrieve("hooked-demo").model_dump()["lora_adapters"] == ["late"]
    assert adapters_of(operator, "hooked-demo") == {"late": 0.0}

    where = {"model": "hooked-demo"}
    scaled_ = operator.post("/lora-adapters", params=where, json=[{"id": 0, "scale": 1}])
    assert scaled_.json() == {"success": True}
    wait_until(lambda: told(client, None, "hooked-demo") == adapted, 120, "the scale to be seen")
    assert told(client, [], "hooked-demo") == plain
    assert operator.post("/lora-adapters", params=where, json=[]).status_code == 200

    before = stack.server_of("hooked-demo")
    gone = operator.post("/v1/unload_lora_adapter", json={"lora_name": "late"})
    assert gone.status_code == 200
    wait_until_reloaded(client, stack, "hooked-demo", before)
    assert told(client, None, "hooked-demo") == plain
    with pytest.raises(openai.BadRequestError):
        told(client, "late", "hooked-demo")
    assert operator.post("/v1/unload_lora_adapter", json=late).status_code == 404


def test_adapter_that_the_engine_refuses_leaves_its_model_as_it_was(
    client: openai.OpenAI, operator: httpx.Client, stack: ServedStack
) -> None:
    """Its file says that it is for such models, and its halves do not fit each other."""
    file = write_misfit(stack.data_dir / "models" / "misfit.gguf")
    plain, before = told(client, None, "hooked-demo"), stack.server_of("hooked-demo")
    body = {"lora_name": "misfit", "lora_path": file.name, "model": "hooked-demo"}
    assert operator.post("/v1/load_lora_adapter", json=body).status_code == 200
    wait_until(lambda: adapters_of(operator, "hooked-demo") == {}, 120, "it to be dropped")
    wait_until_reloaded(client, stack, "hooked-demo", before)
    assert told(client, None, "hooked-demo") == plain


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("load", {"lora_path": "../secret_key"}, 400, "lora_path"),
        ("load", {"lora_path": "/etc/passwd"}, 400, "lora_path"),
        ("load", {"lora_path": "ghost.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "a/../good.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "good.so"}, 400, "lora_path"),
        ("load", {"lora_path": "linked.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "x" * 300 + ".gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "a\x00b"}, 400, "lora_path"),
        ("load", {"lora_path": "no-adapter.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "text.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "other.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "stranger.gguf"}, 400, "lora_path"),
        ("load", {"lora_path": "good.gguf", "lora_name": "demo"}, 409, "lora_name"),
        ("load", {"lora_path": "good.gguf", "lora_name": "one"}, 409, "lora_name"),
        ("load", {"lora_path": "good.gguf", "lora_name": "a b"}, 400, "lora_name"),
        ("load", {"lora_path": "good.gguf", "model": "ghost"}, 404, "model"),
        ("load", {"lora_path": "good.gguf", "model": "scripted"}, 400, "model"),
        ("load", {"lora_path": "good.gguf", "model": None}, 400, "model"),
        ("load", {}, 400, "lora_path"),
        ("unload", {}, 404, "lora_name"),
        ("unload", {"lora_name": "one"}, 404, "lora_name"),
    ],
)
def test_what_cannot_be_added_is_told(
    operator: httpx.Client,
    http: httpx.Client,
    stack: ServedStack,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
) -> None:
    folder = stack.data_dir / "models"
    folder.mkdir(exist_ok=True)
    if not (folder / "good.gguf").exists():
        write_adapter(folder / "good.gguf")
        write_adapter(folder / "other.gguf", architecture="qwen2")
        write_stranger(folder / "stranger.gguf")
        write_projector(folder / "no-adapter.gguf", 192)
        (folder / "text.gguf").write_text("no adapter")
        outside = write_adapter(stack.data_dir / "outside.gguf")
        (folder / "linked.gguf").symlink_to(outside)
        (folder / "good.so").symlink_to("good.gguf")
    body = {"lora_name": "new", "model": "tuned", **fields}
    refused = operator.post(f"/v1/{path}_lora_adapter", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert http.post(f"/v1/{path}_lora_adapter", json=body).status_code == 403
    assert http.post("/lora-adapters", params={"model": "tuned"}, json=[]).status_code == 403
    assert adapters_of(http, "tuned") == {"one": 0.0, "two": 0.0}
