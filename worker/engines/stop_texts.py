"""Stop texts: where a text that comes in pieces ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a text that comes in pieces before the stop text that ends first.

    Of two that end at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop text that ended the text. Feed nothing after it is set."""

    def feed(self, text: str) -> str:
        """Take the next piece; return the text that is certain to be outside of stop texts."""
        text = self._held + text
        matches = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if matches:
            cut, self.found = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return text[:cut]
        # The end of the text may be the beginning of a stop text.
        prefixes = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text
