"""Fetches the models that operators and keys ask for, one at a time, beside what runs."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import django.db
import redis.exceptions
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction

from inference_site.catalogue.catalogue import catalogue, id_of
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.hub import BeingFetched, HubError, Reference, fetch
from inference_site.catalogue.model_files import files_of
from inference_site.catalogue.model_store.models import Pull, PullState, StoredModel
from inference_site.catalogue.models_file import Route
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import release_connection_after

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_STORE_S = 1.0
_LONGEST_ERROR = 2000


class _Stopped(Exception):
    """An operator has stopped the pull, or another worker has it now."""


class Pulls:
    """The thread of one worker that fetches models.

    When a worker ends, another worker continues its pull at the byte where it stopped.
    """

    def __init__(self, worker: str) -> None:
        self._worker, self._host = worker, socket.gethostname()

    def start(self) -> None:
        """Begin to look for pulls, as long as the process lives."""

        def main() -> None:
            outage = OutageLog(logger, "pulls")
            while True:
                try:
                    self.run_next()
                except (django.db.Error, redis.exceptions.RedisError) as exc:
                    outage.failed(exc)
                except Exception:
                    logger.exception("pulls: failed")
                else:
                    outage.succeeded()
                time.sleep(_LOOK_S)

        threading.Thread(target=main, name="pulls", daemon=True).start()

    def run_next(self) -> bool:
        """Fetch the model that has waited longest; return whether there was one."""
        with release_connection_after():
            # It may hold one that waits, or whose end could not be stored.
            pull = Pull.objects.filter(state=PullState.RUNNING, worker=self._worker).first()
            unfinished = Pull.objects.filter(state__in=(PullState.QUEUED, PullState.RUNNING))
            if pull is None and unfinished.exists():
                live = [worker.id for worker in live_workers()]
                pull = Pull.objects.claim(self._worker, self._host, live)
        if pull is None:
            return False
        logger.info("pulling %s", pull.reference)
        try:
            _complete(pull, _Progress(pull).fetched())
        except _Stopped:
            logger.info("the pull of %s was stopped", pull.reference)
        except BeingFetched as exc:
            # The worker that had the pull stops within a second; a command may need longer.
            logger.info("the pull of %s waits: %s", pull.reference, exc)
        except HubError as exc:
            self._fail(pull, _error_text(exc))
        except django.db.Error:
            raise  # The pull stays claimed by this worker, which continues it.
        except Exception:  # For example an answer of a hub that has another form than expected.
            logger.exception("pulls: %s", pull.reference)
            self._fail(pull, "It failed; the log of the worker says why.")
        else:
            logger.info("the pull of %s is completed", pull.reference)
        return True

    def _fail(self, pull: Pull, error: str) -> None:
        logger.info("the pull of %s has failed: %s", pull.reference, error)
        with release_connection_after():
            Pull.objects.move(pull, PullState.FAILED, error=error)


class _Progress:
    """One pull: stores its progress once a second, and ends when an operator stops it."""

    def __init__(self, pull: Pull) -> None:
        self._pull, self._stored_at = pull, 0.0

    def fetched(self) -> Path:
        """Return the file. Raise HubError, or _Stopped."""
        reference = Reference.read(self._pull.reference)
        path = fetch(reference, Path(settings.MODELS_DIR), self._pull.revision, self._store)
        self._update()  # It may have been stopped during the check of the whole file.
        return path

    def _store(self, have: int, size: int) -> None:
        now = time.monotonic()
        if now - self._stored_at < _STORE_S and have < size:
            return
        self._stored_at = now
        self._update(have_bytes=have, size_bytes=size)

    def _update(self, **facts: int) -> None:
        with release_connection_after():
            if not Pull.objects.move(self._pull, PullState.RUNNING, **facts):
                raise _Stopped


def _complete(pull: Pull, path: Path) -> None:
    """Keep the model in the database, so that it is served, and complete the pull, both or neither.

    An existing entry with this id and this file is not changed: the operator wrote it. Raise
    _Stopped, and HubError for an id that no model can have, or that another model has: a file of a
    hub must not replace a model only because of its name.
    """
    id_ = pull.model_id or id_of(path)
    file = path.relative_to(settings.MODELS_DIR).as_posix()
    wanted = StoredModel(model_id=id_, entry={"file": f"hf:{file}"})
    try:
        wanted.clean_fields()
    except ValidationError as exc:
        message = f"{file} is downloaded, but {id_!r} cannot be an ID; pull it with another ID."
        raise HubError(message) from exc
    taken = HubError(
        f"{file} is downloaded, but {id_} is the ID of another model; pull it with another ID."
    )
    if _is_of_another_file(id_, path):
        raise taken
    with release_connection_after(), transaction.atomic():
        if not Pull.objects.move(pull, PullState.COMPLETED, error="", model_id=id_):
            raise _Stopped
        stored, _ = StoredModel.objects.get_or_create(
            model_id=id_, defaults={"entry": wanted.entry}
        )
        if str(stored.entry.get("file", "")).removeprefix("hf:") != file:
            raise taken


def _is_of_another_file(id_: str, path: Path) -> bool:
    """Whether a model or route of the catalogue has this id or alias, but not this file."""
    known = catalogue().named(id_)  # Also finds models by their architecture, for example.
    if known is None or id_.casefold() not in map(str.casefold, (known.id, *known.aliases)):
        return False
    return isinstance(known, Route) or path.parent.resolve() / path.name not in files_of(known)


def _error_text(exc: HubError) -> str:
    """Return the text of a fault for the page of pulls.

    It has names that the hub chose: characters that PostgreSQL refuses are replaced.
    """
    cause = exc.__cause__
    if isinstance(cause, OSError) and cause.errno is not None and cause.filename is not None:
        text = f"{cause.strerror}: {cause.filename} on {socket.gethostname()}."
    elif isinstance(cause, OSError) and cause.strerror:
        text = f"{cause.strerror}, on {socket.gethostname()}."
    else:
        text = str(exc)
    return text.encode(errors="replace").decode().replace("\0", "?")[:_LONGEST_ERROR]
