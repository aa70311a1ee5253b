"""What each role may send: every form and button of the console, as docs/people.md says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.test import Client

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from tests.console.test_every_page import ADDRESSES
from tests.responses_api.chains import Chain

pytestmark = pytest.mark.redis
VIEWER = {"requests-columns", "requests-filters"}
OPERATOR = VIEWER | {
    *("queue-action", "queue-stop", "fleet-action", "pull-stop"),
    *("my-keys", "my-key-act", "my-connection-begin", "my-connection-end"),
    *("alarms_alarm_handle", "alarms_rule_test", "outbox_message_again"),
    *("batches_batch_again", "batches_batch_cancel"),
    *("responses_api_storedresponse_again", "responses_api_storedresponse_stop"),
    *("model_store_storedmodel_estimate", "model_store_pull_add", "cases_caseset_delete"),
    *(
        f"{model}_{action}"
        for model in (
            *("alarms_rule", "outbox_endpoint", "mcp_servers_mcpserver"),
            *("model_store_storedmodel", "responses_api_prompttemplate"),
        )
        for action in ("add", "change", "delete")
    ),
}
ADMINISTRATOR = OPERATOR | {
    *("settings", "accounts_apikey_act", "responses_api_mcpapproval_answer"),
    *("accounts_apikey_add", "accounts_apikey_change"),
    *("accounts_project_add", "accounts_project_change"),
    *("accounts_budget_change", "accounts_budget_delete"),
    *("auth_user_add", "auth_user_change", "auth_user_password_change"),
    *("auth_group_add", "auth_group_change", "auth_group_delete"),
    *("cases_caseset_change", "cases_caseset_run", "cases_caseset_cancel", "cases_caseset_case"),
    "vector_stores_vectorstore_search",
    *(
        f"{model}_{action}"
        for model in ("responses_api_storedresponse", "completions_storedcompletion")
        for action in ("case", "cases", "feedback")
    ),
}
_READ = (
    *("_changelist", "_history", "_export", "_try", "usage-csv", "usage-jsonl", "requests-export"),
    *("index", "fleet", "model", "parts", "playground", "queue", "request", "requests"),
    *("view_on_site", "/1/", "password_reset", "people_invitation", "people_reset"),
)
"""Ends of the names of pages that only show something, and of those before a login."""
_SESSION = {"login", "logout", "jsi18n", "password_change", "search"}


def test_each_role_sends_what_it_may_and_nothing_else(
    member: Callable[..., tuple[User, Client]], api_key: tuple[ApiKey, str]
) -> None:
    addresses = {
        name.removeprefix("admin:"): address
        for name, address in ADDRESSES
        if name.startswith("admin:") and not name.removeprefix("admin:").endswith(_READ)
    }
    stored = Chain(api_key[0]).turn("Hi")
    chat = {"model": "m", "messages": [], "completion": {"choices": []}}
    completion = StoredCompletion.objects.create(project_id=stored.project_id, **chat)
    for name, pk in (("responses_api", stored.pk), ("completions", completion.pk)):
        kind = "storedresponse" if name == "responses_api" else "storedcompletion"
        addresses[f"{name}_{kind}_case"] = f"/admin/{name}/{kind}/{pk}/case/"

    def sent(role: str) -> set[str]:
        _, browser = member(role, role)
        names = addresses.keys() - _SESSION
        statuses = {name: browser.post(addresses[name]).status_code for name in names}
        return {name for name, status in statuses.items() if status not in (403, 405)}

    assert sent("viewer") == VIEWER
    assert sent("operator") == OPERATOR
    assert sent("administrator") == ADMINISTRATOR
