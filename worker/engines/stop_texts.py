"""Stop texts: where a text that comes in pieces ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a text at the stop text that is the first to be complete, whatever the pieces.

    Of two that are complete at one place, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop text that ended it; nothing is to be fed after."""

    def feed(self, text: str) -> str:
        """Take the next piece; return what is certain to be no part of a stop text."""
        text = self._held + text
        starts = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if starts:
            cut, self.found = min(starts, key=lambda found: (found[0] + len(found[1]), found[0]))
            self._held = ""
            return text[:cut]
        shown = len(text) - self._half_a_stop(text)
        self._held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Return what was held back, once nothing follows."""
        text, self._held = self._held, ""
        return text

    def _half_a_stop(self, text: str) -> int:
        """Return how much of the end may be the beginning of a stop text."""
        starts = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)
