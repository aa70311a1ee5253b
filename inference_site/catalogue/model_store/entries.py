"""Entries in the database: parsed as those of the models file are, with stricter checks.

The owner of the host writes the models file. The entries here are written by people who may not
read the host's files, run code on it or reach its network, so each option is allowed explicitly,
files must be below ``MODELS_DIR``, and servers must have public addresses unless the settings allow
others.

Secrets of entries are encrypted, so that a copy of the database does not contain them. The key is
derived from ``SECRET_KEY``, which web processes and workers share. A secret without the prefix
``sealed:`` is plain text.

``watch_models`` keeps a process's catalogue up to date with the folder of models and the database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import django.db
from cryptography.fernet import InvalidToken
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from inference_site.catalogue.catalogue import CatalogueChanges, catalogue, specs_to_load
from inference_site.catalogue.engines.registry import ENGINES
from inference_site.catalogue.model_files import file_below
from inference_site.catalogue.model_store.models import StoredModel
from inference_site.catalogue.models_file import ModelEntry, read_entry
from inference_site.catalogue.operator_settings import InvalidSetting
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import resolve_within
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.cipher import cipher_for
from inference_site.core.storage.postgresql import release_connection_after

logger = logging.getLogger(__name__)

_CHAT = frozenset(
    {
        *("channels", "chat_template", "chat_template_kwargs", "force_enable_thinking", "guard"),
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
            *("check_every_s", "connections", "fields", "flavor", "guard", "headers", "model"),
            "timeout_s",
        }
    ),
    "scripted": frozenset({"guard", "script"}),
}
"""The options that an entry in the database may have, by engine; the empty name is for all engines.

``api_key_env`` and ``api_key_file`` are not allowed: they would send any secret of the worker to a
server that the entry names.
"""

_PRIVATE_ADDRESS = (
    "{} has an address that is not public; the owner of the site may allow it in "
    "UPSTREAM_ALLOWED_HOSTS or UPSTREAM_ALLOWED_NETWORKS"
)
_RESOLVE_TIMEOUT_S = 2.0
_SEALED_PREFIX, _CIPHER_PURPOSE = "sealed:", "model entries"
REFRESH_PERIOD_S = 2.0


def encrypt_secrets(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its API key and headers encrypted; encrypted ones stay as they are."""

    def encrypt(_key: str, secret: str) -> str:
        if secret.startswith(_SEALED_PREFIX):
            return secret
        return _SEALED_PREFIX + cipher_for(_CIPHER_PURPOSE).encrypt(secret.encode()).decode()

    return _map_secrets(entry, encrypt)


def decrypt_secrets(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as the models file would have it.

    Raise InvalidSetting for a secret that was encrypted with another ``SECRET_KEY``.
    """

    def decrypt(key: str, secret: str) -> str:
        if not secret.startswith(_SEALED_PREFIX):
            return secret
        token = secret.removeprefix(_SEALED_PREFIX).encode()
        try:
            return cipher_for(_CIPHER_PURPOSE).decrypt(token).decode()
        except (InvalidToken, UnicodeError) as exc:
            message = "it was encrypted with another SECRET_KEY: write it again"
            raise InvalidSetting((key,), message) from exc

    return _map_secrets(entry, decrypt)


def _map_secrets(entry: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    changed = dict(entry)
    if isinstance(changed.get("api_key"), str):
        changed["api_key"] = change("api_key", changed["api_key"])
    if isinstance(headers := changed.get("headers"), dict):
        changed["headers"] = {
            name: change("headers", value) if isinstance(value, str) else value
            for name, value in headers.items()
        }
    return changed


def read_stored_entry(
    id_: str, entry: Mapping[str, Any], *, any_address: bool = False
) -> ModelSpec:
    """Return the spec of an entry, whose secrets may be encrypted.

    ``any_address`` allows private addresses of its servers. Raise InvalidSetting, also for an
    option or a file that only the models file may name.
    """
    engine = entry.get("engine", ModelEntry.model_fields["engine"].default)
    if isinstance(engine, str) and engine in ENGINES:  # ``read_entry`` refuses others.
        if engine not in ALLOWED_OPTIONS:
            raise InvalidSetting(("engine",), f"only the models file may have the engine {engine}")
        known = {*ModelEntry.model_fields, *ENGINES[engine].options.model_fields}
        options = ALLOWED_OPTIONS[""] | ALLOWED_OPTIONS[engine]
        if refused := known.intersection(entry) - options:
            raise InvalidSetting((min(refused),), "only the models file may have it")
    allowed = None if any_address else allowed_addresses()
    spec = read_entry(id_, decrypt_secrets(entry), _path_below_models_dir, allowed)
    if allowed is not None:
        for key, host in _server_hosts(spec):
            if not allowed.may_name(host):
                raise InvalidSetting((key,), _PRIVATE_ADDRESS.format(host))
    return spec


def allowed_addresses() -> AllowedAddresses:
    """Return the addresses that servers of entries in the database may have, by the settings."""
    return AllowedAddresses(
        tuple(settings.UPSTREAM_ALLOWED_HOSTS), tuple(settings.UPSTREAM_ALLOWED_NETWORKS)
    )


def check_resolved_addresses(spec: ModelSpec) -> None:
    """Raise InvalidSetting if the name of a server resolves to an address that is not allowed.

    This gives the form an early error; workers check the address of each connection. It waits at
    most two seconds for a name.
    """
    allowed = allowed_addresses()
    for key, host in _server_hosts(spec):
        try:
            addresses = resolve_within(host, _RESOLVE_TIMEOUT_S)
        except TimeoutError:
            continue
        if not all(allowed.has(host, address) for address in addresses):
            raise InvalidSetting((key,), _PRIVATE_ADDRESS.format(host))


def entry_error(stored: StoredModel) -> str:
    """Return why the catalogue leaves out the model of a row; an empty text if it does not."""
    result = _spec_or_error(stored.model_id, stored.entry, stored.any_address)
    return "" if isinstance(result, ModelSpec) else result


def private_address_error(stored: StoredModel) -> str:
    """Return why a valid row could not be saved again, if only for its servers' addresses."""
    spec = _spec_or_error(stored.model_id, stored.entry, any_address=True)
    if not isinstance(spec, ModelSpec):
        return ""
    strict = _spec_or_error(stored.model_id, stored.entry, any_address=False)
    if not isinstance(strict, ModelSpec):
        return strict
    try:
        check_resolved_addresses(spec)
    except InvalidSetting as exc:
        return _message(exc)
    return ""


def _spec_or_error(id_: str, entry: Any, any_address: bool) -> ModelSpec | str:
    """Return the spec of a row's entry, or its error."""
    try:
        return read_stored_entry(id_, dict(entry), any_address=any_address)
    except (InvalidSetting, ValueError, TypeError) as exc:
        return _message(exc)
    except Exception as exc:  # One bad row must not stop the others from being served.
        logger.exception("the model %s of the database cannot be read", id_)
        return type(exc).__name__


def _path_below_models_dir(file: str, endings: Sequence[str]) -> str:
    return str(file_below(Path(settings.MODELS_DIR), file.removeprefix("hf:"), endings))


def _server_hosts(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield the option and the host of each of an entry's servers."""
    for key in ("base_url", "base_urls"):
        given = spec.options.get(key) or []
        for url in given if isinstance(given, list) else [given]:
            yield key, str(url.host or "").strip("[]")


def _message(exc: Exception) -> str:
    path = ".".join(getattr(exc, "path", ()))
    return f"{path}: {exc}" if path else str(exc)


class StoredSpecs:
    """The specs of the entries in the database; an entry is parsed again only when it changed."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, bool]] = {}
        self._specs: dict[str, ModelSpec] = {}

    def read(self) -> list[ModelSpec]:
        """Return the specs of all valid entries. Raise the database's errors."""
        rows = StoredModel.objects.order_by("pk").values_list("model_id", "entry", "any_address")
        entries = {id_: (entry, any_address) for id_, entry, any_address in rows}
        specs = {}
        for id_, (entry, any_address) in entries.items():
            if self._entries.get(id_) == (entry, any_address):
                if id_ in self._specs:
                    specs[id_] = self._specs[id_]
                continue
            result = _spec_or_error(id_, entry, any_address)
            if isinstance(result, ModelSpec):
                specs[id_] = result
            else:
                logger.warning("the model %s of the database is left out: %s", id_, result)
        self._entries, self._specs = entries, specs
        return list(specs.values())


_stored = StoredSpecs()
_outage = OutageLog(logger, "models of the database")
_lock = threading.Lock()


def refresh_catalogue() -> CatalogueChanges:
    """Update the catalogue; return what changed since the last call. Raise OSError of the disk."""
    with _lock:
        return catalogue().update(_read_stored_specs())


def _read_stored_specs() -> list[ModelSpec] | None:
    """Return the models of the database; None while it cannot be read."""
    try:
        with release_connection_after():
            found = _stored.read()
    except django.db.Error as exc:
        _outage.failed(exc)
        return None
    _outage.succeeded()
    return found


def wait_for_specs(names: Sequence[str], timeout_s: float = 30.0) -> list[ModelSpec]:
    """Return the models with these names as ``specs_to_load`` does, also those of the database.

    The database is read only for a name that is unknown without it; wait up to ``timeout_s`` for
    the database. Raise ImproperlyConfigured.
    """
    deadline = time.monotonic() + timeout_s
    stored: list[ModelSpec] | None = None
    while True:
        try:
            return specs_to_load(names)
        except ImproperlyConfigured:
            if stored is not None or time.monotonic() > deadline:
                raise
        with _lock:
            stored = _read_stored_specs()
            catalogue().update(stored)
        if stored is None:
            time.sleep(REFRESH_PERIOD_S / 4)


def watch_models(on_change: Callable[[CatalogueChanges], None] = lambda _: None) -> None:
    """Refresh now, and then periodically on a thread, as long as the process lives."""

    def refresh() -> None:
        try:
            if changes := refresh_catalogue():
                for spec in changes.new:
                    logger.info("the model %s has appeared: %s", spec.id, spec.file or spec.engine)
                on_change(changes)
        except Exception:  # For example a network disk that does not answer.
            logger.exception("models: cannot look for changes")

    def watch() -> None:
        while True:
            time.sleep(REFRESH_PERIOD_S)
            refresh()

    refresh()
    threading.Thread(target=watch, name="models", daemon=True).start()
