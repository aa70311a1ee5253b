from __future__ import annotations

from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict
from report import KEY, SMALL, URL, step

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
LARK, EBNF = 'start: "yes" | "no"', 'root ::= "yes" | "no"'


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int


vllm, sglang = outlines.from_vllm(client, SMALL), outlines.from_sglang(client, SMALL)
for name, model, grammar in (("vLLM", vllm, LARK), ("SGLang", sglang, EBNF)):

    @step(f"{name}: structured output")
    def structured(model: outlines.models.Model = model) -> None:
        told = model("Ann is seven.", Person, max_tokens=400, temperature=0)
        assert Person.model_validate_json(told).name, told

    @step(f"{name}: choice, regular expression, grammar")
    def others(model: outlines.models.Model = model, grammar: str = grammar) -> None:
        said = model("Red or blue?", Literal["red", "blue"], max_tokens=10)
        assert said in ("red", "blue"), said
        assert len(model("When?", Regex("[0-9]{4}"), max_tokens=10)) == 4
        assert model("Is water wet?", CFG(grammar), max_tokens=10) in ("yes", "no")
