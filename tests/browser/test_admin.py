"""The admin in a browser: it works, nothing leaves the host, nothing is out of reach."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import assert_fits, faults

PAGES = [
    "/admin/",
    "/admin/worker/generation/",
    "/admin/responses_api/storedresponse/",
    "/admin/responses_api/conversation/",
    "/admin/completions/storedcompletion/",
    "/admin/accounts/project/",
    "/admin/accounts/project/1/change/",
    "/admin/accounts/apikey/",
    "/admin/accounts/apikey/add/",
    "/admin/accounts/budget/",
    "/admin/auth/user/",
    "/admin/admin/logentry/",
]


@pytest.mark.parametrize("path", PAGES)
def test_pages_have_no_serious_fault_of_accessibility(page: Page, path: str) -> None:
    response = page.goto(path)
    assert response is not None
    assert response.status == 200
    page.wait_for_load_state("networkidle")
    assert_fits(page)
    assert faults(page) == []
