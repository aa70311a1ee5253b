from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel
from report import KEY, MODEL, PERSON, SMALL, URL, step

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)


class Person(BaseModel):
    name: str
    age: int


@step("structured output")
def played() -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": PERSON}]
    told = asked.chat.completions.create(model=MODEL, messages=messages, response_model=Person)
    assert told.model_dump() == {"name": "Ann", "age": 7}


@step("structured output of a small model")
def real() -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": "Ann is seven years old. Who is that?"}]
    told = asked.chat.completions.create(
        model=SMALL, messages=messages, response_model=Person, max_tokens=80, temperature=0
    )
    assert told.name


@step("tool as the structure")
def tools() -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": 'CALL Person {"name": "Ann", "age": 7}'}]
    told = asked.chat.completions.create(model=MODEL, messages=messages, response_model=Person)
    assert told.model_dump() == {"name": "Ann", "age": 7}
