from __future__ import annotations

import json

import dspy
from report import KEY, MODEL, PERSON, URL, holds, step

ANSWER = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"
SITE = {"api_base": f"{URL}/v1", "api_key": KEY, "cache": False}

for name, kind in (("chat completions", "chat"), ("responses", "responses")):
    played = dspy.LM(f"openai/{MODEL}", model_type=kind, **SITE)

    @step(f"{name}: prediction")
    def predict(played: dspy.LM = played) -> None:
        with dspy.context(lm=played):
            asked = f"Please.\nSAY {json.dumps(ANSWER)}"
            holds(dspy.Predict("question -> answer")(question=asked).answer, "Paris")

    @step(f"{name}: JSON adapter")
    def structured(played: dspy.LM = played) -> None:
        with dspy.context(lm=played, adapter=dspy.JSONAdapter()):
            person = dspy.Predict("text -> name: str, age: int")(text=f"Please.\n{PERSON}")
        assert (person.name, person.age) == ("Ann", 7)
