"""Log probabilities, in the form of chats and in that of completions."""

from __future__ import annotations

from typing import Any

from inference_site.domain.deltas import TokenLogprob


def read_logprobs(wire: dict[str, Any], top: int) -> tuple[TokenLogprob, ...]:
    """Return the entries of a chunk, each with its ``top`` likeliest. Raise KeyError, TypeError."""
    if "content" in wire:
        return tuple(_entry(entry, top) for entry in wire["content"] or ())
    others = wire.get("top_logprobs") or [{}] * len(wire.get("tokens") or ())
    return tuple(
        _token(token, 0.0 if logprob is None else logprob, _likeliest(likeliest or {}, top))
        for token, logprob, likeliest in zip(
            wire.get("tokens") or (), wire.get("token_logprobs") or (), others, strict=False
        )
    )


def _entry(entry: dict[str, Any], top: int) -> TokenLogprob:
    others = tuple(_entry(other, 0) for other in (entry.get("top_logprobs") or ())[:top])
    told = entry.get("bytes")
    if told is None:
        return _token(entry["token"], entry["logprob"], others)
    return TokenLogprob(entry["token"], entry["logprob"], bytes(told), others)


def _likeliest(wire: dict[str, float], top: int) -> tuple[TokenLogprob, ...]:
    ordered = sorted(wire.items(), key=lambda item: -item[1])[:top]
    return tuple(_token(token, logprob) for token, logprob in ordered)


def _token(token: str, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(token, logprob, token.encode(), top)
