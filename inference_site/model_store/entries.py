"""Secrets of entries in the database: encrypted, so that a copy of it does not have them.

The key is derived from ``SECRET_KEY``, which web processes and workers share. A text in an entry
that is not sealed is taken as it is.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from cryptography.fernet import InvalidToken
from django.conf import settings

from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.model_files import file_below
from inference_site.catalogue.models_file import Entry, read_entry
from inference_site.catalogue.operator_settings import BadKey
from inference_site.domain.addresses import AllowedAddresses
from inference_site.domain.model_spec import ModelSpec
from inference_site.model_store.models import StoredModel
from inference_site.storage.cipher import cipher_for

_MARK, _PURPOSE = "sealed:", "model entries"


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the upstream's key and headers encrypted; what is sealed stays."""
    return _with_secrets(entry, _seal)


def opened(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as the models file would have it.

    Raise BadKey for a secret that was sealed with another ``SECRET_KEY``.
    """
    return _with_secrets(entry, _open)


def _with_secrets(entry: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    found = dict(entry)
    if isinstance(found.get("api_key"), str):
        found["api_key"] = change("api_key", found["api_key"])
    if isinstance(headers := found.get("headers"), dict):
        found["headers"] = {
            name: change("headers", value) if isinstance(value, str) else value
            for name, value in headers.items()
        }
    return found


def _seal(_key: str, text: str) -> str:
    if text.startswith(_MARK):
        return text
    return _MARK + cipher_for(_PURPOSE).encrypt(text.encode()).decode()


def _open(key: str, text: str) -> str:
    if not text.startswith(_MARK):
        return text
    try:
        return cipher_for(_PURPOSE).decrypt(text.removeprefix(_MARK).encode()).decode()
    except (InvalidToken, UnicodeError) as exc:
        told = "it was encrypted with another SECRET_KEY: write it again"
        raise BadKey((key,), told) from exc


logger = logging.getLogger(__name__)

_CHAT = frozenset(
    {
        *("channels", "chat_template", "chat_template_kwargs", "force_enable_thinking"),
        *("prompt_templates", "reasoning_end", "reasoning_has_calls", "reasoning_header"),
        *("reasoning_reenters", "reasoning_start", "stop_texts", "tool_format"),
    }
)
ALLOWED_OPTIONS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {
            *("aliases", "context_length", "engine", "file", "forced_sampling", "gpu_layers"),
            *("hosts", "keep_alive", "listed", "lora_adapters", "preload", "price", "projects"),
            *("replicas", "sampling", "slots", "threads"),
        }
    ),
    "ctransformers": _CHAT | {"lib", "model_type"},
    "llama_cpp": _CHAT
    | {
        *("cache_type_k", "cache_type_v", "draft_gpu_layers", "draft_max", "draft_min"),
        *("draft_model", "draft_p_min", "embedding", "fim_tokens", "flash_attn", "main_gpu"),
        *("matryoshka", "mlock", "mmproj", "modalities", "n_batch", "n_ubatch", "numa"),
        *("prompt_cache_mib", "rope_freq_base", "rope_freq_scale", "rope_scaling", "split_mode"),
        *("tensor_split", "yarn_orig_ctx"),
    },
    "openai_upstream": frozenset(
        {
            *("api_key", "base_url", "base_urls", "capabilities", "chat_template_kwargs"),
            *("check_every_s", "connections", "fields", "flavor", "headers", "model", "timeout_s"),
        }
    ),
    "scripted": frozenset({"script"}),
}
"""What an entry in the database may have, by engine; under the empty name, with any engine.

``api_key_env`` and ``api_key_file`` are not among it: they would send any secret of the worker to a
server that the entry names.
"""

_ADDRESSES = ("base_url", "base_urls")
_NOT_ALLOWED = (
    "{} has an address that is not public; the owner of the site may allow it in "
    "UPSTREAM_ALLOWED_HOSTS or UPSTREAM_ALLOWED_NETWORKS"
)
_LOOK_UP_S = 2.0


def read_stored_entry(
    id_: str, entry: Mapping[str, Any], *, any_address: bool = False
) -> ModelSpec:
    """Return the spec of an entry, whose secrets may be sealed.

    ``any_address``: its servers may be at private addresses, too. Raise BadKey, also for an option
    or a file that only the models file may name.
    """
    _check_options(entry)
    allowed = None if any_address else allowed_addresses()
    spec = read_entry(id_, opened(entry), _located, allowed)
    if allowed is not None:
        for key, host in _hosts(spec):
            if not allowed.may_name(host):
                raise BadKey((key,), _NOT_ALLOWED.format(host))
    return spec


def allowed_addresses() -> AllowedAddresses:
    """Return where servers of entries in the database may be, by the settings."""
    return AllowedAddresses(
        tuple(settings.UPSTREAM_ALLOWED_HOSTS), tuple(settings.UPSTREAM_ALLOWED_NETWORKS)
    )


def check_names_of_servers(spec: ModelSpec) -> None:
    """Raise BadKey if a server's name resolves to an address that is not allowed, from here.

    Workers look again at each connection; this is for the form, which says so at once. It waits two
    seconds for a name at most.
    """
    allowed = allowed_addresses()
    for key, host in _hosts(spec):
        if not all(allowed.has(host, address) for address in _look_up(host)):
            raise BadKey((key,), _NOT_ALLOWED.format(host))


def fault_of_entry(stored: StoredModel) -> str:
    """Return why the model of a row is left out of the catalogue; an empty text if it is not."""
    tried = _tried(stored.model_id, stored.entry, stored.any_address)
    return "" if isinstance(tried, ModelSpec) else tried


def private_servers(stored: StoredModel) -> str:
    """Return why a row could not be saved as it is, if that is for its servers' addresses only."""
    spec = _tried(stored.model_id, stored.entry, any_address=True)
    if not isinstance(spec, ModelSpec):
        return ""
    strict = _tried(stored.model_id, stored.entry, any_address=False)
    if not isinstance(strict, ModelSpec):
        return strict
    try:
        check_names_of_servers(spec)
    except BadKey as exc:
        return _told(exc)
    return ""


def _tried(id_: str, entry: Any, any_address: bool) -> ModelSpec | str:
    """Return the spec of an entry as it is in a row, or what is wrong with it."""
    try:
        return read_stored_entry(id_, dict(entry), any_address=any_address)
    except (BadKey, ValueError, TypeError) as exc:
        return _told(exc)
    except Exception as exc:  # Of one row, which must not keep the others from being served.
        logger.exception("the model %s of the database cannot be read", id_)
        return type(exc).__name__


def _check_options(entry: Mapping[str, Any]) -> None:
    """Raise BadKey for an option of the entry's engine that only the models file may have."""
    engine = entry.get("engine", Entry.model_fields["engine"].default)
    if isinstance(engine, str) and engine in ENGINES and engine not in ALLOWED_OPTIONS:
        raise BadKey(("engine",), f"only the models file may have the engine {engine}")
    declared = ENGINES.get(engine) if isinstance(engine, str) else None
    if declared is None:
        return  # What it says of the engine is wrong.
    known = {*Entry.model_fields, *declared.options.model_fields}
    allowed = ALLOWED_OPTIONS[""] | ALLOWED_OPTIONS[engine]
    if refused := known.intersection(entry) - allowed:
        raise BadKey((min(refused),), "only the models file may have it")


def _located(file: str, endings: Sequence[str]) -> str:
    """Return where a file lies: names are read from ``MODELS_DIR``. Raise ValueError."""
    return str(file_below(Path(settings.MODELS_DIR), file.removeprefix("hf:"), endings))


def _hosts(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield the hosts of an entry's servers, each with its option."""
    for key in _ADDRESSES:
        given = spec.options.get(key) or []
        for url in given if isinstance(given, list) else [given]:
            yield key, str(url.host or "").strip("[]")


def _look_up(host: str) -> list[str]:
    """Return the addresses of a host; none if they are not known in time."""
    found: SimpleQueue[list[str]] = SimpleQueue()

    def ask() -> None:
        try:
            places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            places = []
        found.put([str(place[4][0]) for place in places])

    threading.Thread(target=ask, daemon=True).start()  # The resolver knows no time limit.
    try:
        return found.get(timeout=_LOOK_UP_S)
    except Empty:
        return []


def _told(exc: Exception) -> str:
    path = ".".join(getattr(exc, "path", ()))
    return f"{path}: {exc}" if path else str(exc)


class StoredSpecs:
    """The specs of the entries; each is read anew when it has changed."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, bool]] = {}
        self._specs: dict[str, ModelSpec] = {}

    def read(self) -> list[ModelSpec]:
        """Return the specs; entries that are wrong are left out. Raise the database's errors."""
        rows = StoredModel.objects.order_by("pk").values_list("model_id", "entry", "any_address")
        found = {id_: (entry, any_address) for id_, entry, any_address in rows}
        if found != self._entries:
            old, self._entries = self._entries, found
            changed = {id_: entry for id_, entry in found.items() if old.get(id_) != entry}
            kept = {id_: spec for id_, spec in self._specs.items() if id_ in found}
            self._specs = {id_: s for id_, s in kept.items() if id_ not in changed}
            for id_, (entry, any_address) in changed.items():
                self._add(id_, entry, any_address)
        return [self._specs[id_] for id_ in found if id_ in self._specs]

    def _add(self, id_: str, entry: Any, any_address: bool) -> None:
        tried = _tried(id_, entry, any_address)
        if isinstance(tried, ModelSpec):
            self._specs[id_] = tried
        else:
            logger.warning("the model %s of the database is left out: %s", id_, tried)
