"""The site of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tool_loop.servers import LoopSite, loop_site, play, playing_in


@pytest.fixture(scope="package")
def site() -> Iterator[LoopSite]:
    """A site with a counted tool, whose calls may take 2 s and return 4 KB."""
    limits = {"TOOL_TIMEOUT_S": "2", "TOOL_OUTPUT_BYTES": "4096", "TOOL_CALLS_MAX": "6"}
    with loop_site(**limits, DRAIN_TIMEOUT_S="15") as running:
        running.stack.sql("UPDATE accounts_apikey SET scopes = '{inference,models:write}'")
        yield running


@pytest.fixture
def tight(site: LoopSite) -> Iterator[LoopSite]:
    """The site, whose model has a context of 7,000 characters."""
    site.model.answers = [playing_in(7000)]
    site.model.asked.clear()
    yield site
    site.model.answers = [play]
