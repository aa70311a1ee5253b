"""The main text of a web page, taken from its HTML in a limited process.

``python -m worker.tools.page_text`` reads pages. A question is the HTML in base64 and the name of
its character encoding, empty if the host did not give one; the answer is the page's title and text.
"""

from __future__ import annotations

import base64

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import map_encoding_to_html5

from inference_site.core.limited_process import serve
from worker.document_text import tree_of_html

_CPU_S = 2.0
"""Processor time for one page. The largest takes 0.06 s, on a slow host 0.5 s."""
_MEMORY = 2**30
_ENOUGH = 200
"""Characters: where the main content has fewer, the page is read as a whole, menus included."""


def read_page(encoded: str, charset: str) -> tuple[str, str]:
    """Return the title and the text of a page."""
    encoding = map_encoding_to_html5(charset, False) if charset else None
    tree = tree_of_html(base64.b64decode(encoded), encoding)
    text = extract_plain_text(tree, main_content=True, alt_texts=False)
    if len(text) < _ENOUGH:
        text = extract_plain_text(tree, alt_texts=False)
    return tree.title or "", text


if __name__ == "__main__":
    serve(read_page, _CPU_S, _MEMORY)
