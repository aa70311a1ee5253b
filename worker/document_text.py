"""The text of documents, read in a process of its own: a hostile one costs that process only.

``python -m worker.document_text`` reads a PDF from its input and writes the text of its pages. Each
document has its process, unlike in ``limited_process``: a long one takes seconds, and the documents
of other projects must not wait for it.
"""

from __future__ import annotations

import io
import resource
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CPU_S, _WALL_S = 20, 60
_MEMORY = 1024 * 1024 * 1024
"""Bytes of address space of the process."""
_MAX_PAGES = 2_000
_MAX_CHARACTERS = 4_000_000
_REFUSED = 3
"""The exit status of a process that has written why the document cannot be read."""


class UnreadableDocument(Exception):
    """The document has no text that can be read. The client sees the message."""


def text_of_pdf(content: bytes) -> str:
    """Return the text of a PDF, pages apart by form feeds. Raise UnreadableDocument.

    It may have 2,000 pages; a text of more than 4 million characters is cut.
    """
    command = [sys.executable, "-m", "worker.document_text"]
    try:
        read = subprocess.run(
            command,
            check=False,
            cwd=_ROOT,
            env={},
            input=content,
            capture_output=True,
            timeout=_WALL_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise UnreadableDocument("The PDF could not be read in time.") from exc
    if read.returncode:
        raise UnreadableDocument(
            read.stderr.decode("utf-8", "replace").strip()
            if read.returncode == _REFUSED
            else "The PDF takes too much time or memory, or is damaged."
        )
    text = read.stdout.decode("utf-8", "replace")
    if not text.strip():
        raise UnreadableDocument("The PDF has no text: its pages may be images.")
    return text


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # Other systems have no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    from pypdf import PdfReader  # Only this process needs it.
    from pypdf.errors import PyPdfError

    try:
        pdf = PdfReader(io.BytesIO(sys.stdin.buffer.read()))
        if pdf.is_encrypted and not pdf.decrypt(""):
            sys.stderr.write("The PDF is encrypted.")
            return _REFUSED
        if len(pdf.pages) > _MAX_PAGES:
            sys.stderr.write(f"The PDF has {len(pdf.pages)} pages; at most {_MAX_PAGES} are read.")
            return _REFUSED
        left = _MAX_CHARACTERS
        for number, page in enumerate(pdf.pages):
            text = ("\f" if number else "") + page.extract_text()[:left]
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            left -= len(text)
            if left <= 0:
                break
    except PyPdfError:
        sys.stderr.write("This is not a PDF that can be read.")
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
