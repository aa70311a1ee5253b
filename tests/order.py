"""A pytest plugin: which of several processes runs which tests, and what comes first.

Starting a site takes about ten seconds of a processor. So the tests of folders that share one stay
in one process, and the other tests are handed out by file. What takes longest goes first, so that
the small files at the end keep all processes busy until it is over.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SHARED = pytest.StashKey[ExitStack]()
"""What tests of several folders share. It is closed when the next test is of another group."""

TOGETHER = {
    "e2e/": "e2e",
    "faults/": "faults",
    "faults/test_one_truth.py": "faults, two",
    "faults/test_responses_survive.py": "faults, two",
    "faults/test_rolling_restarts.py": "faults, two",
    "browser/": "plain stack",
    "contract/": "plain stack",
    "faults/on_demand/": "faults on demand",
    "deployment/": "deployment",
    "vector_stores/": "tools stack",
    "web_search/": "tools stack",
    "mcp/test_messages.py": "tools stack",
    "faults/test_killed_judgement.py": "tools stack",
    "hostile/": "hostile",
    "first_hour/": "first_hour",
    "tool_loop/": "tool loop",
    "mcp/": "mcp",
    "faults/silent/": "faults silent",
    "e2e/test_routes.py": "routes",
    "faults/test_celery.py": "routes",
    "strict_fields/": "routes",
    "real/": "real",
}
"""The tests that share a running site, in the order of their length; the longest prefix decides.

Most tests of faults wait, so two processes have a site for them.
"""
OWN_SITE = ("faults/test_room.py", "faults/test_replicas.py")
FIRST = (*TOGETHER, *OWN_SITE, "worker/")
LAST = "tests/faults/test_serve.py"  # It stops the sites of its folder.


class ByFolderOrFile(LoadFileScheduling):  # type: ignore[misc]  # xdist ships no types.
    """Hands out whole folders and files (``--dist loadfile``)."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid) or str(super()._split_scope(nodeid))


def _group(nodeid: str) -> str:
    """Return what this test stays in one process with, or an empty text."""
    return TOGETHER.get(_prefix(nodeid), "")


def _prefix(nodeid: str) -> str:
    """Return the longest of these prefixes that a test has, or an empty text."""
    path = nodeid.partition("tests/")[2]
    return max(filter(path.startswith, FIRST), key=len, default="")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Take the place of ``--dist loadfile``."""
    return ByFolderOrFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    """Have nothing that is shared."""
    config.stash[SHARED] = ExitStack()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what is left when the run was stopped."""
    config.stash[SHARED].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Close what is shared after the last test of its group: a site that nobody asks is not free.

    In one process the folders of a group need not follow each other: there it stays to the end.
    """
    yield
    next_group = _group(nextitem.nodeid) if nextitem else ""
    if nextitem is None or (_is_one_of_several() and next_group != _group(item.nodeid)):
        item.config.stash[SHARED].close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first, where tests are handed out."""
    items.sort(key=lambda item: item.nodeid.startswith(LAST))
    if _is_one_of_several():
        items.sort(key=_rank)


def _is_one_of_several() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _rank(item: pytest.Item) -> int:
    prefix = _prefix(item.nodeid)
    return FIRST.index(prefix) if prefix else len(FIRST)
