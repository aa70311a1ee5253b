"""Search over the text of items: by words, through the index, whatever their size."""

from __future__ import annotations

import pytest
from django.db import connection

from inference_site.accounts.models import Project
from responses_api.models import Item
from responses_api.search import item_text, words
from worker.queue import new_id

pytestmark = pytest.mark.django_db


def store(text: str) -> str:
    """Store an item of this text; return its id."""
    project, _ = Project.objects.get_or_create(name="search")
    content = [{"type": "input_text", "text": text}]
    data = {"type": "message", "role": "user", "status": "completed", "content": content}
    return Item.objects.create(public_id=new_id("msg_"), project=project, data=data).public_id


def found(text: str) -> set[str]:
    """The ids of the items that have these words."""
    rows = Item.objects.annotate(text=item_text()).filter(text=words(text))
    return set(rows.values_list("public_id", flat=True))


def test_item_is_found_by_any_of_its_words() -> None:
    fox, bear = store("The quick brown fox\njumped over Łódź."), store("A brown bear slept.")
    assert found("fox") == {fox}
    assert found("FOX quick") == {fox}
    assert found("jumped") == {fox}  # At the beginning of a line.
    assert found("łódź") == {fox}
    assert found("brown") == {fox, bear}
    assert found("brown cat") == set()
    assert found("' OR 1=1 --") == set()


def test_large_item_is_stored_and_found_by_its_beginning() -> None:
    large = store("needle " + " ".join(f"word{i}" for i in range(400_000)))
    assert found("needle") == {large}
    image = store("data:image/png;base64," + "A" * 3_000_000)
    assert found("base64") >= {image}


def test_search_goes_through_the_index() -> None:
    store("A brown bear slept.")
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        plan = Item.objects.annotate(text=item_text()).filter(text=words("bear")).explain()
    assert "item_text" in plan
