"""The text of documents, read in a process with limits, so that a hostile one harms that only.

``python -m worker.document_text FORMAT`` reads a document from its input and writes its text. Each
document has its process, unlike in ``limited_process``: a long one takes seconds, and the documents
of other projects must not wait for it.
"""

from __future__ import annotations

import io
import re
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resiliparse.parse.html import HTMLTree

_ROOT = Path(__file__).resolve().parent.parent
_CPU_S, _WALL_S = 20, 60
_MEMORY = 1024 * 1024 * 1024
"""Bytes of address space of the process."""
_MAX_PAGES = 2_000
MAX_CHARACTERS = 4_000_000
_MAX_UNPACKED = 200 * 1024 * 1024
"""Bytes that the parts of a DOCX may have, all together: a small archive can have any number."""
_REFUSED = 3
"""The exit status of a process that has written why the document cannot be read."""
_HTML = re.compile(
    rb"\s*+(?:(?><!--.*?-->)\s*+)*+<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL
)
"""How a page begins. It does not backtrack: 30 comments in a row blocked a worker for minutes."""
_HTML_NAMES = (".html", ".htm", ".xhtml")
_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SNIFFED = 4096
_UNKNOWN = "The file is neither text nor a PDF, DOCX or HTML file."


class UnreadableDocument(Exception):
    """The document has no text that can be read. The client sees the message."""


def text_of(content: bytes, filename: str, timeout_s: float = _WALL_S) -> str:
    """Return the text of a PDF, a DOCX, an HTML page or a text file. Raise UnreadableDocument.

    The content decides the format; the ending of the name only distinguishes HTML from other text.
    A PDF may have 2,000 pages; a text of more than 4 million characters is cut.
    """
    if content.startswith(b"%PDF-"):
        return _read("pdf", "PDF", content, timeout_s)
    if content.startswith(b"PK\x03\x04"):
        return _read("docx", "DOCX", content, timeout_s)
    if _HTML.match(content[:_SNIFFED]) or filename.lower().endswith(_HTML_NAMES):
        return _read("html", "HTML page", content, timeout_s)
    bom = next((bom for bom in _BOMS if content.startswith(bom)), None)
    try:
        text = content.decode(_BOMS[bom] if bom else "utf-8")
    except UnicodeDecodeError as exc:
        if b"\0" in content[:_SNIFFED]:
            raise UnreadableDocument(_UNKNOWN) from exc
        from charset_normalizer import from_bytes  # Few files need it.

        found = from_bytes(content[: 1024 * 1024]).best()
        if found is None:
            raise UnreadableDocument(_UNKNOWN) from exc
        text = content.decode(found.encoding, "replace")
    if "\0" in text[:_SNIFFED]:
        raise UnreadableDocument(_UNKNOWN)
    if not text.strip():
        raise UnreadableDocument("The file has no text.")
    return text[:MAX_CHARACTERS]


def _read(format_: str, name: str, content: bytes, timeout_s: float) -> str:
    command = [sys.executable, "-m", "worker.document_text", format_]
    try:
        read = subprocess.run(
            command,
            check=False,
            cwd=_ROOT,
            env={},
            input=content,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as exc:
        raise UnreadableDocument(f"The {name} could not be read in time.") from exc
    if read.returncode:
        raise UnreadableDocument(
            read.stderr.decode("utf-8", "replace").strip()
            if read.returncode == _REFUSED
            else f"The {name} takes too much time or memory, or is damaged."
        )
    text = read.stdout.decode("utf-8", "replace")
    if not text.strip():
        raise UnreadableDocument(f"The {name} has no text: its pages may be images.")
    return text


def _pages_of_pdf(content: bytes) -> Iterator[str]:
    import pypdfium2  # Only this process needs it.

    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as exc:
        is_locked = "password" in str(exc).lower()
        reason = "The PDF is encrypted." if is_locked else "This is not a PDF that can be read."
        raise UnreadableDocument(reason) from exc
    if len(pdf) > _MAX_PAGES:
        raise UnreadableDocument(f"The PDF has {len(pdf)} pages; at most {_MAX_PAGES} are read.")
    for number in range(len(pdf)):
        page = pdf[number]
        text = page.get_textpage().get_text_bounded()
        page.close()
        yield ("\f" if number else "") + text.replace("\r\n", "\n")


def _blocks_of_docx(content: bytes) -> Iterator[str]:
    from docx import Document
    from docx.table import Table

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > _MAX_UNPACKED:
            raise UnreadableDocument(
                f"The DOCX has {unpacked} bytes unpacked; at most {_MAX_UNPACKED} are read."
            )
        document = Document(io.BytesIO(content))
    except UnreadableDocument:
        raise
    except Exception as exc:  # A library that reads hostile archives and XML may raise anything.
        raise UnreadableDocument("This is not a DOCX that can be read.") from exc
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            for row in block.rows:
                yield "\t".join(cell.text for cell in row.cells) + "\n"
        else:
            yield block.text + "\n"


def _text_of_html(content: bytes) -> Iterator[str]:
    from resiliparse.extract.html2text import extract_plain_text

    yield extract_plain_text(tree_of_html(content), alt_texts=False)


def tree_of_html(content: bytes, encoding: str | None = None) -> HTMLTree:
    """Parse a page in this encoding, or without one in UTF-8, the one it names, or a guess.

    A guess about few characters is often wrong: "café" alone was taken for Windows-1250.
    """
    from resiliparse.parse.encoding import detect_encoding
    from resiliparse.parse.html import HTMLTree

    text = content.decode("utf-8-sig", "replace")
    # An encoding of 7 bits, such as Japan's, is ASCII too. In others few bytes are UTF-8 by chance.
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    is_utf8 = not content.isascii() and text.count("\ufffd") <= beyond_ascii / 2
    encoding = encoding or ("utf-8" if is_utf8 else detect_encoding(content, from_html_meta=True))
    if encoding is None or encoding == "utf-8":
        # From the bytes, one invalid one would have the whole page read as Windows-1252.
        return HTMLTree.parse(text)
    return HTMLTree.parse_from_bytes(content, encoding)


_READERS: Mapping[str, Callable[[bytes], Iterator[str]]] = {
    "pdf": _pages_of_pdf,
    "docx": _blocks_of_docx,
    "html": _text_of_html,
}


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # Other systems have no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    left = MAX_CHARACTERS
    try:
        for text in _READERS[sys.argv[1]](sys.stdin.buffer.read()):
            sys.stdout.buffer.write(text[:left].encode("utf-8", "replace"))
            left -= len(text)
            if left <= 0:
                break
    except UnreadableDocument as exc:
        sys.stderr.write(str(exc))
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
