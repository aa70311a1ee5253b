"""The page of a vector store: its files, and what a question would find."""

from __future__ import annotations

from contextlib import closing

from tests.served_stack import token
from tests.vector_stores.conftest import FJORDS, TEA, ReadingSite


def test_page_shows_the_files_and_what_a_question_would_find(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS, tea_txt=TEA, odd_pdf=b"%PDF-1.4 no")
    [[pk]] = site.stack.sql(
        "SELECT id FROM vector_stores_vectorstore WHERE public_id = %s", store.id
    )
    with closing(site.stack.signed_in()) as who:
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
