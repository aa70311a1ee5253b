"""``manage.py serve``: run the whole stack on this host with one command."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from inference_site.catalogue.catalogue import DEMO_FILE, REAL_MODEL, catalogue, specs_to_load
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.hub import HubError, Reference, downloaded
from inference_site.catalogue.model_files import model_file_error
from inference_site.catalogue.model_store.entries import wait_for_specs
from inference_site.core import environment
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.management.commands.pull import pulled
from inference_site.ops.serve.processes import say, stop
from inference_site.ops.serve.real_model import RealModel
from inference_site.ops.serve.services import ServiceError
from inference_site.ops.serve.stack import Stack
from inference_site.ops.serve.startup import (
    FirstSecrets,
    Welcome,
    prepare_site,
    show_secrets,
    wait_until_ready,
)

_MAX_PROCESSES = 64


class Command(BaseCommand):
    """Runs until SIGINT or SIGTERM arrives; SIGHUP replaces its processes."""

    help = "Run everything on this host: PostgreSQL, Redis, web, worker and beat."
    requires_system_checks: list[str] = []  # The children run them in their own environment.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default=environment.text("HOST", "127.0.0.1"))
        parser.add_argument("--port", type=int, default=environment.number("PORT", 8000))
        for name, kind in (("web", "WEB"), ("workers", "WORKER")):
            parser.add_argument(
                f"--{name}",
                type=int,
                choices=range(1, _MAX_PROCESSES + 1),
                default=environment.number(f"{kind}_PROCESSES", 1, 1),
                metavar="N",
                help=f"how many {kind.lower()} processes",
            )
        parser.add_argument(
            "--model",
            default=environment.text("MODEL") or None,
            help="fetch and serve it: owner/name:Q4_K_M, or owner/name/file",
        )

    def handle(self, *_: Any, host: str, port: int, model: str | None, **options: Any) -> None:
        started = time.monotonic()
        # They interrupt the start like Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.default_int_handler)
        data_dir: Path = settings.DATA_DIR
        try:
            specs = _good_models(_fetch_model(model))
        except KeyboardInterrupt as exc:
            raise CommandError("Stopped.") from exc
        _check_counts(options["web"], options["workers"])
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise CommandError(f"DATA_DIR cannot be made: {exc}.") from exc
        stack = Stack(data_dir, host, port, options["web"], options["workers"])
        secrets, is_up = FirstSecrets(None, None), False
        real_model = RealModel(Path(settings.MODELS_DIR), say) if _has_real_model(model) else None
        try:
            if real_model is not None:
                real_model.start()
            try:
                stack.start_services()
                stack.start_processes()
            except OSError as exc:
                raise ServiceError(f"DATA_DIR cannot be used: {exc}.") from exc
            say("starting; loading " + (", ".join(spec.id for spec in specs) or "no model"))
            try:
                secrets = prepare_site(stack.database_url, data_dir)  # While the processes start.
            except Error as exc:
                raise ServiceError(f"The database could not be prepared: {exc}") from exc
            except OSError as exc:
                raise ServiceError(f"DATA_DIR cannot be used: {exc}.") from exc
            stack.open_web()
            if _names_only_in_database():
                specs = wait_for_specs(settings.START_MODELS)
            url = _url(host, port)
            failed = wait_until_ready(url, stack, say)
            _explain(failed, stack)
            specs = [spec for spec in specs if spec.id not in failed]
            welcome = Welcome(url, data_dir, secrets, [spec.id for spec in specs])
            if specs:
                chats = "chat" in model_capabilities(specs[0])
                welcome = replace(welcome, example_model=specs[0].id, example_chats=chats)
            welcome.show()
            if real_model is None:
                welcome.show_request()
            else:
                real_model.announce(welcome)
            is_up = True
            say(f"ready in {time.monotonic() - started:.1f} s; Ctrl-C stops it")
            stack.supervisor.run(None if real_model is None else real_model.is_announced)
        except (ServiceError, ImproperlyConfigured) as exc:
            raise CommandError(str(exc)) from exc
        except KeyboardInterrupt:
            pass
        finally:
            if not is_up:
                show_secrets(secrets)
            if real_model is not None:
                real_model.stop()
            stop(stack.supervisor)


def _check_counts(web: int, workers: int) -> None:
    """Raise CommandError for too many processes; the environment has defaults without a bound."""
    for name, count in (("web", web), ("workers", workers)):
        if count > _MAX_PROCESSES:
            raise CommandError(f"At most {_MAX_PROCESSES} processes for --{name}.")
    if settings.METRICS_PORT + workers - 1 > environment.MAX_PORT:
        raise CommandError(f"METRICS_PORT: {settings.METRICS_PORT} leaves no port for each worker.")


def _has_real_model(model: str | None) -> bool:
    """Whether to fetch the small real model: beside the demo, unless there is another model."""
    if not (settings.REAL_MODEL and settings.DEMO_MODEL and model is None):
        return False
    models = catalogue()
    return all(models.is_shipped(id_) or id_ == REAL_MODEL for id_ in models.models)


def _fetch_model(model: str | None) -> Path | None:
    """Return the file of ``--model``, fetched unless MODELS_DIR has it. Raise CommandError."""
    if model is None:
        return None
    try:
        reference = Reference.read(model)
    except HubError as exc:
        raise CommandError(str(exc)) from exc
    return downloaded(reference, Path(settings.MODELS_DIR)) or pulled(model)


def _good_models(file: Path | None) -> list[ModelSpec]:
    """Return the models that can be served, and print the faults of the others.

    The model of ``--model`` comes first, then models that chat, the operator's own before shipped
    ones. Raise CommandError for an invalid models file, and if no model that the operator named can
    be served.
    """
    try:
        later = _names_only_in_database()
        names = [name for name in settings.START_MODELS if name not in later]
        specs = specs_to_load(names) if names or not settings.START_MODELS else []
    except ImproperlyConfigured as exc:
        raise CommandError(str(exc)) from exc
    if file is not None and all(spec.file != file for spec in specs):
        raise CommandError(f"No model of MODELS_FILE or START_MODELS has the file {file}.")
    faults = {
        spec.id: fault
        for spec in specs
        if spec.file != DEMO_FILE and (fault := model_file_error(spec))
    }
    lines = [f"the model {id_} cannot be served: {fault}" for id_, fault in faults.items()]
    named = [spec for spec in specs if spec.id not in catalogue().optional]
    if named and all(spec.id in faults for spec in named):
        raise CommandError("\n".join(lines))
    for line in lines:
        say(line)

    def rank(spec: ModelSpec) -> tuple[bool, bool, bool]:
        is_wanted = file is not None and spec.file == file
        chats = "chat" in model_capabilities(spec)
        return not is_wanted, not chats, catalogue().is_shipped(spec.id)

    return sorted((spec for spec in specs if spec.id not in faults), key=rank)


def _names_only_in_database() -> list[str]:
    """Return the names of START_MODELS that the models file does not have."""
    names = settings.START_MODELS
    return [name for name in names if names != ["none"] and catalogue().find(name) is None]


def _explain(failed: list[str], stack: Stack) -> None:
    """Print why models could not be loaded, from the worker's log."""
    log = stack.log_of("worker")
    for model in failed:
        found = re.findall(rf"Model '{re.escape(model)}': .*", log)
        say(found[-1] if found else f"the model {model} could not be loaded; see the worker's log")


def _url(host: str, port: int) -> str:
    """Return the address of the site for a client on this host."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # Only compared.
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
