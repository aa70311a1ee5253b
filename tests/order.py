"""A pytest plugin: which of several processes runs which tests, and what comes first.

Starting a site takes about ten seconds of a processor. So the tests of a folder that has one stay
in one process, and the other tests are handed out by file. What takes longest goes first, so that
the small files at the end keep all processes busy until it is over.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("e2e", "deployment", "browser", "faults", "first_hour")


class ByFolderOrFile(LoadFileScheduling):  # type: ignore[misc]  # xdist ships no types.
    """Hands out whole folders and files (``--dist loadfile``)."""

    def _split_scope(self, nodeid: str) -> str:
        folder = _folder(nodeid)
        return folder if folder in TOGETHER else str(super()._split_scope(nodeid))


def _folder(nodeid: str) -> str:
    return nodeid.partition("tests/")[2].partition("/")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Take the place of ``--dist loadfile``."""
    return ByFolderOrFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test an id of its own, and put what takes longest first.

    Tests that schemathesis makes, one for each operation of the API, all have the id of their
    function; xdist hands tests out by their ids, and of those that share one it runs the first.
    """
    for item in items:
        if not item.nodeid.endswith(item.name):
            item._id = item.id.with_params(item.name.partition("[")[2].removesuffix("]"))
    assert len({item.nodeid for item in items}) == len(items), "tests share an id"
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folder = _folder(item.nodeid)
    return TOGETHER.index(folder) if folder in TOGETHER else len(TOGETHER)
