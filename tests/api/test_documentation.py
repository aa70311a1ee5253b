"""The OpenAPI document is built once and kept."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from inference_site.gateway.api import documentation, openapi


def test_the_document_is_built_once_for_a_source(tmp_path: Path) -> None:
    (tmp_path / "openapi-of-an-old-source.json").write_text("{}")
    documentation._document.cache_clear()
    with patch.object(openapi, "document", return_value=b'{"built": 1}'):
        assert documentation.document(tmp_path) == b'{"built": 1}'
    documentation._document.cache_clear()  # As in another process.
    with patch.object(openapi, "document", side_effect=AssertionError):
        assert documentation.document(tmp_path) == b'{"built": 1}'
    assert len(list(tmp_path.iterdir())) == 1
    documentation._document.cache_clear()


def test_a_document_that_cannot_be_kept_is_answered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with patch.object(openapi, "document", return_value=b"{}"):
        assert documentation.document(tmp_path / "file") == b"{}"
    documentation._document.cache_clear()
