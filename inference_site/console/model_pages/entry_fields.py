"""Between the fields of the model form and an entry as the models file has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from inference_site.catalogue.operator_settings import InvalidSetting

HIDDEN = "(hidden)"
"""Stands for a secret in what is shown; written back, it means the secret that is kept."""
_SECRETS = ("api_key", "headers")
_ADDRESSES = ("base_url", "base_urls")
_PRICE = {"price_input": "input", "price_cached": "cached", "price_output": "output"}
PLAIN = ("engine", "file", "slots", "context_length", "gpu_layers", "keep_alive")
LISTS = ("aliases", "projects")
_MOST_YAML = 20_000
_DEEPEST_YAML = 20


def form_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the form's fields for an entry, without its secrets."""
    shown = hidden(entry)
    price = shown.pop("price", {})
    values = {name: shown.pop(name) for name in PLAIN if name in shown}
    values |= {name: ", ".join(shown.pop(name, ())) for name in LISTS}
    values |= {name: price.get(key) for name, key in _PRICE.items()}
    values["is_listed"] = shown.pop("listed", True)
    values["more"] = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True) if shown else ""
    return values


def entry_of(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry that the form's values describe; ``before`` has the secrets they hide.

    Raise BadKey.
    """
    entry = {name: values[name] for name in PLAIN if values.get(name) not in (None, "")}
    for name in LISTS:
        given = [part.strip() for part in (values.get(name) or "").split(",")]
        if names := [part for part in given if part]:
            entry[name] = names
    price = {key: values[name] for name, key in _PRICE.items() if values.get(name) is not None}
    if price:
        entry["price"] = price
    if not values.get("is_listed"):
        entry["listed"] = False
    more = _mapping(values.get("more") or "")
    if twice := more.keys() & {*PLAIN, *LISTS, "price", "listed"}:
        raise InvalidSetting((min(twice),), "it has a field of its own above")
    return _with_secrets({**entry, **more}, before)


def hidden(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with its secrets hidden."""
    shown = dict(entry)
    if "api_key" in shown:
        shown["api_key"] = HIDDEN
    if isinstance(headers := shown.get("headers"), dict):
        shown["headers"] = dict.fromkeys(headers, HIDDEN)
    return shown


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what has changed, for the audit log; secrets are named only."""
    old, new = hidden(before), hidden(after)
    told = []
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name):
            continue
        if name in _SECRETS:
            told.append(f"{name} changed")
        else:
            told.append(f"{name}: {old.get(name, '—')} → {new.get(name, '—')}")
    return "; ".join(told) or "No changes."


def _mapping(text: str) -> dict[str, Any]:
    if len(text) > _MOST_YAML:
        raise InvalidSetting(("more",), f"it has more than {_MOST_YAML:,} characters")
    try:
        _bounded(text)
        found = yaml.safe_load(text)
    except InvalidSetting:
        raise
    except (yaml.YAMLError, ValueError) as exc:
        problem = getattr(exc, "problem", None) or type(exc).__name__
        raise InvalidSetting(("more",), f"it is not YAML: {problem}") from exc
    if found is not None and not isinstance(found, dict):
        raise InvalidSetting(("more",), "it must map names of settings to values")
    return {str(name): value for name, value in (found or {}).items()}


def _bounded(text: str) -> None:
    """Refuse what YAML reads into more than was written, and what it takes minutes to read."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise InvalidSetting(("more",), "aliases of YAML (*name) are not taken")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            raise InvalidSetting(("more",), f"it is nested more than {_DEEPEST_YAML} deep")


def _with_secrets(entry: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Put kept secrets back; not for another address, whose server must not learn them."""
    is_moved = any(entry.get(name) != before.get(name) for name in _ADDRESSES)
    kept = {} if is_moved else before
    if entry.get("api_key") == HIDDEN:
        entry["api_key"] = _kept(kept.get("api_key"), "api_key")
    if isinstance(headers := entry.get("headers"), dict):
        old = kept.get("headers") or {}
        entry["headers"] = {
            name: _kept(old.get(name), "headers") if value == HIDDEN else value
            for name, value in headers.items()
        }
    return entry


def _kept(secret: Any, key: str) -> Any:
    if secret is None:
        raise InvalidSetting((key,), "write it again: the server's address has changed")
    return secret
