"""One request as a panel and as a page: what happened, where its time went, what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.test import Client

from completions.models import StoredCompletion
from inference_site.accounts.keys import revoke_key
from inference_site.accounts.models import ApiKey
from inference_site.console.key_states import REVOKED, state_at
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.tool_calls.models import ToolCall
from tests.console.test_request_log import CONTENT, VIEW, accepted, ago, failed, refused

Key = tuple[ApiKey, str]
VIEW_KEYS = "accounts.view_apikey"


def shown(browser: Client, row: Any, query: str = "fragment=1") -> str:
    """The panel of a request, or its page."""
    table = "accepted" if isinstance(row, Generation) else "refused"
    answer = browser.get(f"/admin/requests/{table}/{row.pk}/?{query}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_refusal_says_what_was_wrong_and_leads_to_the_setting(
    api_key: Key, staff: Callable[..., Client]
) -> None:
    key = api_key[0]
    mine = {"project_id": key.project_id, "api_key_id": key.pk}
    row = refused(
        9,
        param="tools[0].type",
        message="Rate limit <reached>.",
        trace_id="ab" * 16,
        count=41,
        **mine,
    )
    page = shown(staff(VIEW, VIEW_KEYS), row)
    for text in ("tools[0].type", "Rate limit &lt;reached&gt;.", "ab" * 16, "41", key.name):
        assert text in page
    assert "raise it" in page
    assert f'<a href="/admin/accounts/apikey/{key.pk}/change/">Key {key.name}</a>' in page
    assert "valid then and now" in page
    assert "<html" not in page
    assert "<html" in shown(staff(VIEW), row, "")
    assert f">Key {key.name}</a>" not in shown(staff(VIEW, "auth.view_group"), row)


def test_the_state_of_the_key_is_that_of_the_time(api_key: Key, admin: Client) -> None:
    key = api_key[0]
    before, after = refused(3_600, api_key_id=key.pk), refused(-86_400, api_key_id=key.pk)
    revoke_key(key)
    LogEntry.objects.create(
        user_id=admin.session["_auth_user_id"],
        content_type=ContentType.objects.get_for_model(ApiKey),
        object_id=str(key.pk),
        object_repr=str(key),
        action_flag=2,
        change_message=REVOKED,
    )
    key.refresh_from_db()
    assert state_at(key, before.created_at).startswith("valid then; revoked ")
    assert state_at(key, after.created_at).startswith("revoked ")
    assert " by admin" in shown(admin, after)
    key.expires_at = ago(7_200)
    assert state_at(key, before.created_at).startswith("expired ")


def test_the_parts_of_the_time_add_up_and_calls_of_tools_are_in_it(
    api_key: Key, admin: Client
) -> None:
    times = {"claimed_at": ago(60), "first_token_at": ago(50), "finished_at": ago(0)}
    row = accepted(api_key, 75, status=Status.COMPLETED, admission_ms=25_000, **times)
    call = {"generation_id": row.public_id, "number": 0, "type": "mcp", "name": "<b>read"}
    ToolCall.objects.create(**call, sent_at=ago(20), finished_at=ago(15))
    page = shown(admin, row)
    for name, start, length, took in (
        ("Admission", "0.00%", "25.00%", "25.0 s"),
        ("Queue", "25.00%", "15.00%", "15.0 s"),
        ("Prefill", "40.00%", "10.00%", "10.0 s"),
        ("Decode", "50.00%", "50.00%", "50.0 s"),
        ("Tool &lt;b&gt;read", "80.00%", "5.00%", "5.00 s"),
    ):
        rest = page[page.index(f'<th scope="row">{name}</th>') :]
        rest = rest[: rest.index("</tr>")]
        assert f'x="{start}" width="{length}"' in rest, name
        assert took in rest


def test_one_that_waits_and_one_that_failed_at_once_have_a_page(
    api_key: Key, admin: Client
) -> None:
    assert "Queue" in shown(admin, accepted(api_key, 5))
    page = shown(admin, failed(api_key, 0, "model_error"))
    assert "log" in page
    assert shown(admin, refused(5, duration_ms=0, status=0, error_code="others", path=""))


def test_content_is_shown_by_permission(api_key: Key, staff: Callable[..., Client]) -> None:
    row = accepted(api_key, 5, public_id="chatcmpl-1")
    StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project_id=api_key[0].project_id,
        model="m",
        messages=[{"role": "user", "content": "Say <dog> " + "x" * 500}],
        completion={"choices": [{"message": {"role": "assistant", "content": "Dog."}}]},
    )
    page = shown(staff(VIEW, CONTENT), row)
    assert "Say &lt;dog&gt; " + "x" * 500 in page
    assert "Dog." in page
    assert "/admin/playground/?open=chatcmpl-1" in page
    page = shown(staff(VIEW), row)
    assert "dog" not in page.lower()
    assert "You do not have permission to see prompts and answers." in page


def test_the_requests_before_and_after_are_those_of_the_filters(
    api_key: Key, admin: Client
) -> None:
    rows = [accepted(api_key, 10 - n, model="odd" if n % 2 else "even") for n in range(6)]
    page = shown(admin, rows[3], "model=odd&fragment=1")
    assert f'data-newer="/admin/requests/accepted/{rows[5].pk}/?model=odd"' in page
    assert f'data-older="/admin/requests/accepted/{rows[1].pk}/?model=odd"' in page
    page = shown(admin, rows[5])
    assert 'data-newer=""' in page
    assert f'data-older="/admin/requests/accepted/{rows[4].pk}/"' in page


def test_requests_before_and_after_are_accepted_and_refused_as_in_the_list(
    api_key: Key, admin: Client
) -> None:
    minute = 60
    rows: list[Generation | Refusal] = [
        accepted(api_key, 90 * minute),
        refused(60 * minute),
        refused(30 * minute),
        accepted(api_key, 2),
        refused(1),
    ]
    pages = [
        f"/admin/requests/{'refused' if isinstance(row, Refusal) else 'accepted'}/{row.pk}/"
        for row in rows
    ]
    for nth, page in enumerate(pages):
        text = admin.get(page).content.decode()
        newer, older = pages[nth + 1 : nth + 2], pages[nth - 1 : nth] if nth else []
        assert f'data-newer="{"".join(newer)}"' in text, nth
        assert f'data-older="{"".join(older)}"' in text, nth
    text = admin.get(f"{pages[2]}?status=refused").content.decode()
    assert f'data-newer="{pages[4]}?status=refused"' in text


@pytest.mark.parametrize("address", ["accepted/999999999999999999999", "refused/0", "other/1"])
def test_what_is_not_there_is_a_404(admin: Client, address: str) -> None:
    assert admin.get(f"/admin/requests/{address}/").status_code == 404


def test_the_page_is_for_those_who_see_the_list(api_key: Key, staff: Callable[..., Client]) -> None:
    row = refused(1)
    assert staff().get(f"/admin/requests/refused/{row.pk}/?fragment=1").status_code == 403
