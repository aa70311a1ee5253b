"""The page of a vector store: its files, and what a question would find."""

from __future__ import annotations

import re
from contextlib import closing

import httpx

from tests.vector_stores.conftest import FJORDS, TEA, ReadingSite


def signed_in(site: ReadingSite) -> httpx.Client:
    """A browser of the user whom the first run has made."""
    who = httpx.Client(base_url=site.stack.url, follow_redirects=True, timeout=60)
    page = who.get("/admin/login/")
    found = re.search(r"user: admin +password: (\S+)", site.stack.text())
    assert found is not None
    form = {"username": "admin", "password": found[1], **token(page)}
    who.post("/admin/login/?next=/admin/", data=form, headers={"Referer": str(page.url)})
    return who


def token(page: httpx.Response) -> dict[str, str]:
    """The hidden field that a form of the page sends."""
    found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
    assert found is not None, page.text[:500]
    return {"csrfmiddlewaretoken": found[1]}


def test_page_shows_the_files_and_what_a_question_would_find(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS, tea_txt=TEA, odd_pdf=b"%PDF-1.4 no")
    [[pk]] = site.stack.sql(
        "SELECT id FROM vector_stores_vectorstore WHERE public_id = %s", store.id
    )
    with closing(signed_in(site)) as who:
        listed = who.get("/admin/vector_stores/vectorstore/").text
        assert "library" in listed
        address = f"/admin/vector_stores/vectorstore/{pk}/change/"
        page = who.get(address)
        assert "fjords.txt" in page.text
        assert "This is not a PDF that can be read." in page.text
        assert "Nothing was found" not in page.text
        asked = {"question": "Sognefjord <b>", **token(page)}
        headers = {"Referer": str(page.url)}
        found = who.post(address.replace("change", "search"), data=asked, headers=headers)
        assert found.status_code == 200, found.text[:3000]
        assert "205 km" in found.text
        assert "Sognefjord &lt;b&gt;" in found.text
        [[logged]] = site.stack.sql(
            "SELECT count(*) FROM django_admin_log WHERE change_message LIKE 'Searched%%'"
        )
        assert logged == 1
