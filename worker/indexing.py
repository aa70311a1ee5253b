"""Indexes the files of vector stores: text, chunks and embeddings, beside what the worker serves.

Every worker looks for files and claims one at a time for each of its threads. The embeddings are
background work of the queue, done by any worker that serves the store's embedding model.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import django.db
from django.conf import settings
from django.db import transaction
from django.utils import timezone
from redis.exceptions import RedisError

from inference_site.catalogue.fleet.leases import live_workers
from inference_site.core.domain.errors import EngineError
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE, release_connection_after
from inference_site.files import storage
from inference_site.runs.inner_runs import NoBudget, NotPossible
from inference_site.vector_stores import chunks
from inference_site.vector_stores.kinds import EmbeddingLost, EmbeddingRefused, TextTooLong, embed
from inference_site.vector_stores.models import (
    MAX_ATTEMPTS,
    IndexingStatus,
    VectorStoreFile,
)
from worker.document_text import UnreadableDocument, text_of

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4
"""Chunks are measured in characters: the tokenizers of embedding models differ."""
_THREADS = 2
_LOOK_S = 1.0
_HOLD_S = 600.0
"""A claim ends this long after its last renewal, or as soon as its worker has no lease."""
_RENEW_S = 10.0
_REST_S, _STORAGE_REST_S, _BUDGET_REST_S = 5.0, 15.0, 60.0
"""How long a file is not claimed again after a fault, while the storage of files fails, and after a
budget was used up."""
_STORAGE_PATIENCE = dt.timedelta(days=1)
"""How old a file may be for which failures of the storage are no attempts: a content that is gone
looks like a storage that is away."""
_EMBED_TIMEOUT_S = 3600.0
_AT_ONCE = 16
"""Chunks that are embedded by one generation."""
_SECTION = 100_000
"""Characters that are split at once. The splitter takes the square of the length: for a line of
10 MB, minutes, in which the claim is not renewed."""
_SHORTEST = 200
"""Bytes: if the model refuses even a shorter text as too long, the file fails. A token is a byte or
more; 200 characters may be 800 tokens."""


class _Lost(Exception):
    """The claim is lost, or the file was cancelled or taken out of the store."""


class Indexing:
    """The threads of one worker that index files."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._served: Counter[int] = Counter()
        self._held: set[int] = set()
        self._looking = threading.Lock()
        self._outage = OutageLog(logger, "indexing")
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to look for files."""
        for number in range(_THREADS):
            threading.Thread(target=self._main, name=f"indexing {number}", daemon=True).start()

    def stop(self) -> None:
        """Claim no more files, and give back those that are being indexed.

        If the database is away, their claims are over once the worker has no lease, and count as
        attempts.
        """
        self._stopped.set()
        with self._looking, suppress(django.db.Error), release_connection_after():
            VectorStoreFile.objects.release_all(self._worker)

    def _main(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._looking:  # One thread looks for a file; the others wait for their turn.
                    entry = self._next()
                if entry is None:
                    return
                try:
                    _Document(entry).index()
                finally:
                    self._held.discard(entry.pk)
            except (django.db.Error, RedisError) as exc:
                self._outage.failed(exc)
            except Exception:
                logger.exception("indexing: failed")
            else:
                continue
            self._stopped.wait(_LOOK_S)

    def _next(self) -> VectorStoreFile | None:
        """Wait for a file and claim it; return None once this is stopped."""
        while not self._stopped.is_set():
            entry = None
            with release_connection_after():
                if VectorStoreFile.objects.has_waiting():
                    live = [worker.id for worker in live_workers()]
                    entry = VectorStoreFile.objects.claim(
                        self._worker, set(self._held), live, self._served, _HOLD_S
                    )
            self._outage.succeeded()
            if entry is not None:
                self._held.add(entry.pk)
                self._served[entry.project_id] += 1
                return entry
            self._stopped.wait(_LOOK_S)
        return None


class _Document:
    """One claimed file."""

    def __init__(self, entry: VectorStoreFile) -> None:
        self._entry = entry
        self._renewed_at = time.monotonic()
        self._too_large = math.inf
        """Bytes of the smallest text that the model has refused as too long."""

    def index(self) -> None:
        """Index the file, and store how that ended."""
        try:
            if self._entry.attempts > MAX_ATTEMPTS:
                self._fail("server_error", f"{MAX_ATTEMPTS} workers have ended while they read it.")
            else:
                self._index()
        except _Lost:
            logger.info("file %s is not indexed any more", self._entry)
        except UnreadableDocument as exc:
            self._fail("unsupported_file", str(exc))
        except (chunks.QuotaExceeded, NotPossible) as exc:
            self._fail("invalid_file", str(exc))
        except NoBudget as exc:
            self._rest(_BUDGET_REST_S, exc)
        except storage.UNAVAILABLE as exc:
            is_old = self._entry.created_at < timezone.now() - _STORAGE_PATIENCE
            if is_old and self._entry.attempts >= MAX_ATTEMPTS:
                self._fail("server_error", "The content of the file cannot be read.")
            else:
                self._rest(_STORAGE_REST_S, exc, counts=is_old)
        except (EngineError, TimeoutError, *DATABASE_UNAVAILABLE, RedisError) as exc:
            self._rest(_REST_S, exc)
        except Exception as exc:  # The boundary of a file.
            logger.exception("file %s could not be indexed", self._entry)
            is_final = isinstance(exc, EmbeddingRefused) and not isinstance(exc, EmbeddingLost)
            if self._entry.attempts < MAX_ATTEMPTS and not is_final:
                self._rest(_REST_S, exc, counts=True)
            else:
                self._fail("server_error", "The file could not be indexed.")

    def _index(self) -> None:
        entry = self._entry
        with release_connection_after(), transaction.atomic():
            if not VectorStoreFile.objects.is_held(entry):
                raise _Lost
            chunks.delete_of(entry)
        content = b"".join(storage.read(entry.file))
        text = text_of(content, entry.file.filename).replace("\0", "")
        del content
        parts = list[str]()
        for section in sections(text):
            self._is_lost()
            parts += split(section, entry.file.filename, entry.chunk_size, entry.chunk_overlap)
        with release_connection_after():
            chunks.require_room(entry.project_id, len(parts), settings.CHUNKS_PER_PROJECT)
        size = 0
        for first in range(0, len(parts), _AT_ONCE):
            some = parts[first : first + _AT_ONCE]
            vectors = self._vectors(some)
            with release_connection_after():
                if not chunks.add(entry, first, some, vectors):
                    raise _Lost
            size += sum(len(part.encode()) for part in some) + sum(map(len, vectors)) * 4
        with release_connection_after():
            VectorStoreFile.objects.end(
                entry, IndexingStatus.COMPLETED, chunk_count=len(parts), usage_bytes=size
            )

    def _vectors(self, texts: Sequence[str]) -> list[array[float]]:
        """Return the vectors of texts: of one that is too long, the mean of its halves'.

        The order of words far apart is lost, as it would be in chunks of that length. A text as
        large as one that was refused is not tried, because each refusal is a failed request.
        """
        size = max(len(text.encode()) for text in texts)
        if size < max(_SHORTEST, self._too_large):
            with suppress(TextTooLong):
                return self._embed(texts)
            if len(texts) == 1:
                if size < _SHORTEST:
                    raise NotPossible("The embedding model takes no text of this length.")
                self._too_large = size
        if len(texts) > 1:
            return [vector for text in texts for vector in self._vectors([text])]
        middle = len(texts[0]) // 2
        left, right = self._vectors([texts[0][:middle], texts[0][middle:]])
        return [array("f", ((a + b) / 2 for a, b in zip(left, right, strict=True)))]

    def _embed(self, texts: Sequence[str]) -> list[array[float]]:
        return embed(
            self._entry.api_key_id,
            self._entry.store.embedding_model,
            texts,
            timeout_s=_EMBED_TIMEOUT_S,
            is_cancelled=self._is_lost,
            in_background=True,
        )

    def _is_lost(self) -> bool:
        """Renew the claim every ``_RENEW_S``; raise _Lost if it is lost, else return False."""
        if time.monotonic() - self._renewed_at >= _RENEW_S:
            self._renewed_at = time.monotonic()
            with release_connection_after():
                if not VectorStoreFile.objects.renew(self._entry, _HOLD_S):
                    raise _Lost
        return False

    def _rest(self, seconds: float, why: Exception, *, counts: bool = False) -> None:
        """Release the claim; no worker claims the file for this time."""
        logger.info("file %s is tried again in %d s: %s", self._entry, seconds, why)
        with release_connection_after():
            VectorStoreFile.objects.release(self._entry, seconds, counts=counts)

    def _fail(self, code: str, message: str) -> None:
        # A file that has failed may be added again, and another worker adds its chunks then.
        with release_connection_after(), transaction.atomic():
            facts = {"error_code": code, "error_message": message}
            if VectorStoreFile.objects.end(self._entry, IndexingStatus.FAILED, **facts):
                chunks.delete_of(self._entry)


def sections(text: str) -> Iterator[str]:
    """Yield the text in sections of at most ``_SECTION`` characters, which end where a paragraph, a
    line or a word does, unless none ends in the second half of them."""
    start = 0
    while len(text) - start > _SECTION:
        half, end = start + _SECTION // 2, start + _SECTION
        ends = (text.rfind(mark, half, end) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((found for found in ends if found > half), end)
        yield text[start:end]
        start = end
    yield text[start:]


def split(text: str, filename: str, size: int, overlap: int) -> list[str]:
    """Return the chunks of a text, of at most ``size`` tokens with ``overlap`` of the one before.

    They end at the ends of sections, paragraphs or sentences where there are some.
    """
    from semantic_text_splitter import MarkdownSplitter, TextSplitter  # Most workers never do this.

    of_markdown = filename.lower().endswith((".md", ".markdown"))
    splitter: Callable[[int, int], TextSplitter | MarkdownSplitter]
    splitter = MarkdownSplitter if of_markdown else TextSplitter
    return splitter(size * CHARACTERS_PER_TOKEN, overlap * CHARACTERS_PER_TOKEN).chunks(text)
