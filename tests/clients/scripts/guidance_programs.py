from __future__ import annotations

import json

from guidance import assistant, gen, select, user
from guidance import json as gen_json
from guidance.models.experimental import SglangModel, VLLMModel
from pydantic import BaseModel, ConfigDict
from report import KEY, SMALL, URL, step


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int


SITE = {"base_url": f"{URL}/v1", "api_key": KEY}

for name, model in (("vLLM", VLLMModel), ("SGLang", SglangModel)):

    def ask(question: str, answer: object, model: type = model) -> object:
        asked = model(SMALL, **SITE)
        with user():
            asked += question
        with assistant():
            asked += answer
        return asked

    @step(f"{name}: text with choices")
    def choices(ask: object = ask) -> None:
        answer = "I like " + select(["red", "blue"], name="colour")
        answer += " since " + gen("year", regex="[12][0-9]{3}") + "."
        said = ask("Red or blue?", answer)
        assert said["colour"] in ("red", "blue"), said
        assert 1000 <= int(said["year"]) < 3000, said

    @step(f"{name}: structured output")
    def structured(ask: object = ask) -> None:
        told = ask("Ann is seven.", gen_json("told", schema=Person, max_tokens=400))["told"]
        assert json.loads(told)["name"], told
