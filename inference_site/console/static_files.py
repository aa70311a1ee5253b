"""How the static files of pages are collected and kept."""

from __future__ import annotations

from whitenoise.storage import CompressedManifestStaticFilesStorage


class CollectedStaticFiles(CompressedManifestStaticFilesStorage):
    """Compressed files whose names have hashes, also where modules of JavaScript import another."""

    support_js_module_import_aggregation = True
