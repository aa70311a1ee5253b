"""What the log of refused requests keeps of an error's message: its words, not the request's.

Messages quote values of requests, and values may be content or secrets. The writer of refusals
takes them out before anything is stored:

- everything from the first opening quote to the last closing one, since a value may contain quotes
  itself; the row has the names of the parameter and the model anyway;
- what follows "No such …:" and what an engine or a hub has said;
- every other word that is no plain word or number, such as an id, an address or a path.
"""

from __future__ import annotations

import re

from inference_site.core.observability.logs import redacted
from inference_site.runs.request_log.models import LONGEST_MESSAGE, LONGEST_PARAM

TAKEN_OUT = "…"
_MOST_READ = 4_000
_QUOTES = "'\"`“”‘’"
_OPENING = re.compile(rf"(?<!\w)[{_QUOTES}]")
_CLOSING = re.compile(rf"[{_QUOTES}](?!\w)")
_REPORTED = re.compile(
    r"(?P<start>\bNo such [^:]{1,60}:|\b(?:The model|The server|The hub)\b[^:]{0,40}:).*", re.DOTALL
)
_PLAIN = re.compile(
    r"[(\[]*(?:[A-Za-z]{1,20}(?:[-/'’][A-Za-z]{1,20})*|[0-9][0-9.,]{0,18})%?[\])]*[.,:;?!]*"
)
_PARAM = re.compile(
    r"[A-Za-z_][A-Za-z0-9_]{0,40}(?:\.[A-Za-z0-9_]{1,40}|\[[0-9]{1,6}\])*", re.ASCII
)


def kept_param(param: str | None) -> str:
    """Return the name of a parameter; without it, if it has parts that are no names of fields."""
    given = (param or "")[:LONGEST_PARAM]
    return given if _PARAM.fullmatch(given) else ""


def kept_message(message: str) -> str:
    """Return what is kept of a message, at most ``LONGEST_MESSAGE`` characters."""
    text = redacted(message[:_MOST_READ])
    text = _REPORTED.sub(lambda found: f"{found['start']} {TAKEN_OUT}", text)
    opening = _OPENING.search(text)
    if opening is not None:
        closings = [found.end() for found in _CLOSING.finditer(text, opening.end())]
        text = text[: opening.start()] + TAKEN_OUT + (text[closings[-1] :] if closings else "")
    words = (_kept_word(word) for word in text.split())
    line = re.sub(rf"{TAKEN_OUT}(?: {TAKEN_OUT})+", TAKEN_OUT, " ".join(words))
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 1]}{TAKEN_OUT}"


def _kept_word(word: str) -> str:
    """Return a plain word or number; of others the sign for what was taken out, and a stop."""
    if _PLAIN.fullmatch(word):
        return word
    return TAKEN_OUT + word[len(word.rstrip(".,:;")) :][:1]
