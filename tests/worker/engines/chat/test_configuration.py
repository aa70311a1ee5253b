"""How a model chats, from its entry in the models file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue.engines.options import ChatOptions
from inference_site.catalogue.models_file import read_models_file
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from worker.engines.chat.configuration import ChatConfiguration, Vocabulary, configure_chat
from worker.engines.chat.parser.formats import TOOL_FORMATS
from worker.engines.chat.parser.output import Reasoning

ASK = GenerationRequest("m", (Message("user", "Hi"),))


def configure(template: str | None = "{{ bos_token }}", **options: Any) -> ChatConfiguration:
    spec = ModelSpec("m", "fake", options=options)
    return configure_chat(spec, ChatOptions.of(spec), Vocabulary(template, bos="<s>"))


def test_template_is_the_files_own() -> None:
    found = configure("{{ bos_token }}{{ x }}", chat_template_kwargs={"x": 1})
    assert found.template.render(ASK) == "<s>1"
    assert (found.bos, found.stop) == ("<s>", ())


def test_template_of_a_family_has_its_stop_texts_and_tools() -> None:
    found = configure(None, chat_template="llama3")
    assert found.stop == ("<|eot_id|>", "<|start_header_id|>")
    assert found.syntax.tool_format is TOOL_FORMATS["llama3_json"]


def test_template_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!")
    assert configure(chat_template=str(path)).template.render(ASK) == "Hi!"


def test_template_file_lies_beside_the_models_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    entry = "engine: ctransformers, file: a.gguf, chat_template"
    path.write_text(f"models: {{a: {{{entry}: b.jinja}}, b: {{{entry}: chatml}}}}")
    options = [spec.options for spec in read_models_file(path)]
    assert [found["chat_template"] for found in options] == [str(tmp_path / "b.jinja"), "chatml"]


def test_unknown_template_is_told_with_those_there_are() -> None:
    message = (
        "Could not find a chat template 'llama'; "
        "there are chatml, gemma, llama3, mistral, phi3, zephyr."
    )
    with pytest.raises(EngineLoadError, match=message):
        configure(chat_template="llama")


def test_missing_template_is_told() -> None:
    with pytest.raises(EngineLoadError, match="Model 'm': its file has no chat template"):
        configure(None)


def test_bad_template_is_told() -> None:
    with pytest.raises(EngineLoadError, match="Model 'm': its chat template is not valid"):
        configure("{% if %}")


def test_bos_is_only_cut_where_the_tokenizer_adds_it() -> None:
    vocabulary = Vocabulary("x", bos="<s>", adds_bos=False)
    assert configure_chat(ModelSpec("m", "fake"), ChatOptions(), vocabulary).bos == ""


def test_syntax_is_what_the_template_shows_but_for_the_options() -> None:
    template = "<tool_call> <think></think>"
    assert configure(template).syntax.reasoning == Reasoning()
    found = configure(
        template,
        tool_format="pythonic",
        reasoning_start="[R]",
        reasoning_end="[/R]",
        reasoning_header=" Hm:\n",
        reasoning_reenters=True,
    ).syntax
    assert found.reasoning == Reasoning("[R]", "[/R]", "Hm:", reenters=True)
    assert found.tool_format is TOOL_FORMATS["pythonic"]
    assert configure(template, tool_format="harmony").syntax.channels == "harmony"
    assert configure(template, channels="named").syntax.channels == "named"
    harmony = "<|channel|>x<|message|>"
    assert configure(harmony, tool_format="hermes").syntax.channels == "tags"


@pytest.mark.parametrize(
    "option",
    [
        {"tool_format": "morse"},
        {"channels": "two"},
        {"chat_template": 5},
        {"chat_template_kwargs": []},
        {"force_enable_thinking": "yes"},
        {"reasoning_start": ""},
        {"reasoning_start": "</think>"},
        {"reasoning_header": 1},
    ],
)
def test_bad_option_is_named(option: dict[str, Any]) -> None:
    with pytest.raises(EngineLoadError, match=f"Model 'm'.*'{next(iter(option))}"):
        configure(**option)
