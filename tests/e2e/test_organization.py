"""The organization API, with the official client and a key of an administrator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import script
from tests.served_stack import ServedStack
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def organization(stack: ServedStack) -> Iterator[Any]:
    """What scripts use, with a key that cannot generate."""
    secret = make_key(stack, "admin").secret
    base = f"{stack.url}/v1"
    with openai.OpenAI(
        base_url=base, api_key=secret, admin_api_key=secret, max_retries=0
    ) as opened:
        with pytest.raises(openai.PermissionDeniedError):
            opened.responses.create(model="scripted", input="[]")
        yield opened.admin.organization


def chat(client: openai.OpenAI, model: str = "scripted") -> Any:
    messages: Any = [{"role": "user", "content": script({"text": "yes"})}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=4)


def test_a_script_makes_a_project_and_a_key_that_works_until_it_is_deleted(
    organization: Any, stack: ServedStack
) -> None:
    project = organization.projects.create(name="nightly jobs")
    assert (project.name, project.status) == ("nightly jobs", "active")
    made = organization.projects.service_accounts.create(project.id, name="job")
    client = stack.client(made.api_key.value)
    assert chat(client).choices[0].message.content == "yes"
    (key,) = organization.projects.api_keys.list(project.id)
    assert (key.id, key.name, key.owner.type) == (made.api_key.id, "job", "service_account")
    assert made.api_key.value not in key.to_json()
    assert made.api_key.value.startswith(key.redacted_value.rstrip("…"))
    assert (
        organization.projects.service_accounts.retrieve(made.id, project_id=project.id).name
        == "job"
    )
    assert organization.projects.api_keys.delete(key.id, project_id=project.id).deleted
    assert list(organization.projects.api_keys.list(project.id)) == []
    with pytest.raises(openai.NotFoundError):
        organization.projects.api_keys.retrieve(key.id, project_id=project.id)

    def is_refused() -> bool:
        try:
            chat(client)
        except openai.AuthenticationError:
            return True
        return False

    wait_until(is_refused)


def test_keys_are_listed_by_whether_they_are_valid(organization: Any) -> None:
    """The filter was ignored: a script that deletes inactive keys got all of them."""
    project = organization.projects.create(name="some keys")
    made = organization.projects.service_accounts.create(project.id, name="job")

    def listed(access: str) -> list[str]:
        keys = organization.projects.api_keys.list(project.id, owner_project_access=access)
        return [key.id for key in keys]

    assert (listed("active"), listed("inactive"), listed("any")) == ([made.id], [], [made.id])
    organization.projects.archive(project.id)
    assert (listed("active"), listed("inactive"), listed("any")) == ([], [made.id], [made.id])
    with pytest.raises(openai.BadRequestError) as refused:
        listed("some")
    assert refused.value.param == "owner_project_access"


def test_projects_are_listed_renamed_and_archived(organization: Any) -> None:
    first, second = (organization.projects.create(name=f"list {n}") for n in range(2))
    names = [project.name for project in organization.projects.list(limit=1)]
    assert names.index("list 0") + 1 == names.index("list 1")
    assert organization.projects.update(second.id, name="renamed").name == "renamed"
    assert organization.projects.archive(first.id).status == "archived"
    listed = {project.id for project in organization.projects.list()}
    assert second.id in listed
    assert first.id not in listed
    everything = {project.id for project in organization.projects.list(include_archived=True)}
    assert first.id in everything


def test_each_change_is_in_the_audit_log_of_the_console(
    organization: Any, stack: ServedStack
) -> None:
    projects = organization.projects
    before = stack.sql("SELECT coalesce(max(id), 0) FROM django_admin_log")[0][0]
    project = projects.create(name="audited <b>", extra_headers={"x-request-id": "req_of_mine"})
    projects.update(project.id, name="audited twice")
    projects.update(project.id, name="audited twice")  # It changes nothing.
    key = projects.service_accounts.create(project.id, name="job").api_key
    other = projects.service_accounts.create(project.id, name="other").api_key

    def revoke(_: int) -> bool:
        try:
            return bool(projects.api_keys.delete(key.id, project_id=project.id).deleted)
        except openai.NotFoundError:
            return False

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(revoke, range(3))) == [False, False, True]
    projects.service_accounts.delete(other.id, project_id=project.id)
    for _ in range(2):
        projects.archive(project.id)
    with pytest.raises(openai.ConflictError):
        projects.create(name="audited twice")
    with pytest.raises(openai.ConflictError):
        projects.update(projects.create(name="audited free").id, name="audited twice")
    entries = stack.sql(
        "SELECT username, change_message FROM django_admin_log entry JOIN auth_user "
        "ON auth_user.id = user_id WHERE entry.id > %s ORDER BY entry.id",
        before,
    )
    assert {name for name, _ in entries} == {"organization API"}
    texts = [text.partition(" By the key ") for _, text in entries]
    assert [what for what, _, _ in texts] == [
        "Created.",
        "Name: audited <b> → audited twice.",
        "Created.",
        "Created.",
        "Revoked.",
        "Revoked.",
        "Archived.",
        "Created.",
    ]
    assert all("(key_" in who and ", request req_" in who for _, _, who in texts)
    assert "request req_of_mine" in texts[0][2]
    with closing(stack.signed_in()) as who:
        page = who.get("/admin/admin/logentry/").text
        assert "Name: audited &lt;b&gt; → audited twice. By the key k-" in page
        assert f"/admin/accounts/project/{project.id.removeprefix('proj_')}/change/" in page
        assert "organization API" not in who.get("/admin/auth/user/").text
    assert stack.sql(
        "SELECT is_active, is_staff, is_superuser, left(password, 1) FROM auth_user "
        "WHERE username = 'organization API'"
    ) == [(False, False, False, "!")]


def test_a_script_makes_a_key_with_limits_and_changes_them(
    organization: Any, stack: ServedStack
) -> None:
    projects = organization.projects
    daily = {"unit": "tokens", "every": "day", "amount": 1_000_000, "each": "user"}
    money = {"unit": "cost", "every": "month", "amount": 12.5}
    wanted = {
        "scopes": ["inference"],
        "allowed_models": ["scripted", "demo"],
        "requests_per_minute": 1,
        "priority_requests_per_minute": 2,
        "budgets": [daily, money, {**money, "model": "demo"}],
    }
    project = projects.create(name="limited", extra_body={"tokens_per_minute": 50_000})
    assert (project.tokens_per_minute, project.budgets) == (50_000, [])
    made = projects.service_accounts.create(
        project.id, name="job", expires_in_seconds=3_600, extra_body=wanted
    )
    assert made.api_key.expires_at == pytest.approx(time.time() + 3_600, abs=60)
    client = stack.client(made.api_key.value)
    with pytest.raises(openai.PermissionDeniedError):
        client.embeddings.create(model="demo-embedding", input="a")
    with pytest.raises(openai.PermissionDeniedError):
        client.get("/usage", cast_to=object)
    chat(client, "demo")
    with pytest.raises(openai.RateLimitError):
        chat(client)

    def change(**fields: Any) -> Any:
        return projects.api_keys.update(made.id, project_id=project.id, extra_body=fields)

    def get() -> Any:
        return projects.api_keys.retrieve(made.id, project_id=project.id)

    wait_until(lambda: get().budgets[1]["spent"] > 0)
    (listed,) = projects.api_keys.list(project.id)
    assert listed.budgets == get().budgets
    got = get()
    assert got.expires_at == made.api_key.expires_at
    assert (got.scopes, got.allowed_models) == (["inference"], ["scripted", "demo"])
    assert (got.requests_per_minute, got.concurrent_runs) == (1, None)
    assert got.budgets[0] == {**daily, "model": None, "spent": 0}
    assert got.budgets[2] == {
        **money,
        "model": "demo",
        "each": None,
        "spent": got.budgets[1]["spent"],
    }
    changed = change(requests_per_minute=None, allowed_models=[], budgets=[{**money, "amount": 20}])
    assert (changed.requests_per_minute, changed.allowed_models) == (None, [])
    assert changed.priority_requests_per_minute == 2
    assert changed.budgets == [{**got.budgets[1], "amount": 20}]
    assert change(budgets=None).budgets == []
    update = projects.service_accounts.update
    assert update(made.id, project_id=project.id, name="work").name == "work"
    change(expires_in_seconds=None)
    assert get().expires_at is None
    pk = made.id.removeprefix("key_")
    entries = stack.sql(
        "SELECT split_part(change_message, ' By the key', 1) FROM django_admin_log "
        "WHERE object_id = %s AND content_type_id = (SELECT id FROM django_content_type "
        "WHERE app_label = 'accounts' AND model = 'apikey') ORDER BY id",
        pk,
    )
    texts = [text for (text,) in entries]
    assert texts[0].startswith("Created; requests per minute: none → 1; ")
    assert texts[1:4] == [
        "requests per minute: 1 → none; allowed models: scripted, demo → none; "
        "budgets: 1,000,000 tokens a day for each end user, 12.50 USD a month, "
        "12.50 USD a month for the model demo → 20.00 USD a month.",
        "budgets: 20.00 USD a month → none.",
        "Name: job → work.",
    ]
    assert texts[4].startswith("expires at: ")
    assert texts[4].endswith(" → none.")
    stack.sql("UPDATE accounts_apikey SET expires_at = now() - '1 s'::interval WHERE id = %s", pk)
    with pytest.raises(openai.BadRequestError, match="expired"):
        change(expires_in_seconds=60)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"scopes": ["admin"]}, "scopes[0]"),
        ({"scopes": []}, "scopes"),
        ({"allowed_models": ["scripted", "no\n"]}, "allowed_models[1]"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": 2**31}, "tokens_per_minute"),
        ({"expires_in_seconds": 10**12}, "expires_in_seconds"),
        ({"budgets": [{"unit": "cost", "every": "week", "amount": 1}]}, "budgets[0].every"),
        ({"budgets": [{"unit": "cost", "every": "day", "amount": -1}]}, "budgets[0].amount"),
        ({"budgets": [{"unit": "cost", "every": "day", "amount": 1e11}]}, "budgets[0].amount"),
        (
            {"budgets": [{"unit": "cost", "every": "day", "amount": 1, "each": "tag:none"}]},
            "budgets[0].each",
        ),
        ({"budgets": [{"unit": "cost", "every": "day", "amount": 1}] * 2}, "budgets[1]"),
        (
            {"budgets": [{"unit": "cost", "every": "day", "amount": 1, "model": "judges"}]},
            "budgets[0].model",
        ),
        ({"model_limits": [{"model": "none", "concurrent_runs": 1}]}, "model_limits[0].model"),
        ({"model_limits": [{"model": "demo"}] * 2}, "model_limits[1].model"),
        ({"create_service_account_only": True}, "create_service_account_only"),
    ],
)
def test_a_bad_limit_of_a_new_key_is_refused_and_no_key_is_made(
    organization: Any, stack: ServedStack, fields: Any, param: str
) -> None:
    project = f"proj_{make_key(stack).project_id}"
    known = len(list(organization.projects.api_keys.list(project)))
    with pytest.raises(openai.BadRequestError) as refused:
        organization.projects.service_accounts.create(project, name="k", extra_body=fields)
    assert refused.value.param == param
    assert len(list(organization.projects.api_keys.list(project))) == known


def test_the_rate_limits_of_a_project_are_listed_and_changed_by_model(
    organization: Any, stack: ServedStack
) -> None:
    key = make_key(stack)
    project, limits = f"proj_{key.project_id}", organization.projects.rate_limits
    listed = {one.model: one for one in limits.list_rate_limits(project)}
    assert {"demo", "scripted"} <= set(listed)
    assert {one.max_requests_per_1_minute for one in listed.values()} == {None}
    paged = [one.model for one in limits.list_rate_limits(project, limit=2)]
    assert paged == list(listed)
    last = limits.list_rate_limits(project, before=listed["scripted"].id, limit=1).data
    assert [one.model for one in last] == [paged[paged.index("scripted") - 1]]

    def change(model: str, **fields: Any) -> Any:
        return limits.update_rate_limit(listed[model].id, project_id=project, **fields)

    client = stack.client(key.secret)
    changed = change("scripted", max_requests_per_1_minute=1)
    assert (changed.model, changed.max_requests_per_1_minute) == ("scripted", 1)
    changed = change("scripted", max_tokens_per_1_minute=5_000)
    assert (changed.max_requests_per_1_minute, changed.max_tokens_per_1_minute) == (1, 5_000)

    def is_refused() -> bool:
        try:
            chat(client)
        except openai.RateLimitError as exc:
            return "for the model `scripted`" in str(exc)
        return False

    wait_until(is_refused)
    chat(client, "demo")
    (shown,) = organization.projects.retrieve(project).model_limits
    assert shown == {
        "model": "scripted",
        "requests_per_minute": 1,
        "tokens_per_minute": 5_000,
        "concurrent_runs": None,
    }
    for fields in ({"max_requests_per_1_minute": 0}, {"max_images_per_1_minute": 3}):
        with pytest.raises(openai.BadRequestError) as refused:
            change("scripted", **fields)
        assert refused.value.param == next(iter(fields))
    with pytest.raises(openai.NotFoundError):
        limits.update_rate_limit("rl-none", project_id=project, max_requests_per_1_minute=1)
    removed = {"max_requests_per_1_minute": None, "max_tokens_per_1_minute": None}
    change("scripted", extra_body=removed)
    assert organization.projects.retrieve(project).model_limits == []
    entries = stack.sql(
        "SELECT split_part(change_message, ' By the key', 1) FROM django_admin_log "
        "WHERE object_id = %s AND content_type_id = (SELECT id FROM django_content_type "
        "WHERE app_label = 'accounts' AND model = 'project') ORDER BY id",
        str(key.project_id),
    )
    assert [text for (text,) in entries] == [
        "limits of models: none → scripted: requests per minute 1.",
        "limits of models: scripted: requests per minute 1 → "
        "scripted: requests per minute 1, tokens per minute 5,000.",
        "limits of models: scripted: requests per minute 1, tokens per minute 5,000 → none.",
    ]


def test_a_project_is_limited_to_some_models_whatever_its_keys_may_use(
    organization: Any, stack: ServedStack
) -> None:
    key = make_key(stack, allowed_models=["scripted", "demo", "demo-embedding"])
    project, permissions = f"proj_{key.project_id}", organization.projects.model_permissions
    client = stack.client(key.secret)
    got = permissions.retrieve(project)
    assert (got.mode, got.api_model_ids) == ("deny_list", [])
    refusals = {
        "mode": {"mode": "deny_list", "model_ids": ["demo"]},
        "model_ids": {"mode": "allow_list", "model_ids": []},
        "model_ids[1]": {"mode": "allow_list", "model_ids": ["demo", "none"]},
    }
    for param, fields in refusals.items():
        with pytest.raises(openai.BadRequestError) as refused:
            permissions.update(project, **fields)
        assert refused.value.param == param
    chat(client)
    set_to = permissions.update(project, mode="allow_list", model_ids=["demo", "wide"])
    assert (set_to.mode, set_to.api_model_ids) == ("allow_list", ["demo", "wide"])
    assert organization.projects.retrieve(project).allowed_models == ["demo", "wide"]

    def refusal(model: str) -> str:
        try:
            chat(client, model)
        except openai.PermissionDeniedError as exc:
            return f"{exc.code}: {exc}"
        return ""

    wait_until(lambda: refusal("scripted") != "")
    told = refusal("scripted")
    assert told.startswith("model_not_allowed: ")
    assert "The project of this API key does not allow the model `scripted`" in told
    assert "This API key does not allow the model `wide`" in refusal("wide")
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.PermissionDeniedError):
        client.embeddings.create(model="demo-embedding", input="a")
    chat(client, "demo")
    assert permissions.delete(project).deleted
    wait_until(lambda: refusal("scripted") == "")


def test_rate_limits_are_of_the_models_that_a_project_may_use_also_by_a_route(
    organization: Any,
) -> None:
    projects = organization.projects
    project = projects.create(name="few models", extra_body={"allowed_models": ["demo"]}).id

    def listed() -> set[str]:
        return {one.model for one in projects.rate_limits.list_rate_limits(project)}

    assert listed() == {"demo"}
    projects.model_permissions.update(project, mode="allow_list", model_ids=["rankers"])
    assert listed() == {"ranker"}
    projects.rate_limits.update_rate_limit(
        "rl-ranker", project_id=project, max_requests_per_1_minute=1
    )
    projects.model_permissions.update(project, mode="allow_list", model_ids=["demo"])
    assert listed() == {"demo", "ranker"}, "It has a limit still."


def test_the_limit_of_a_model_that_is_gone_can_be_removed(
    organization: Any, stack: ServedStack
) -> None:
    """It was a 500, and the limit stayed."""
    key, projects = make_key(stack), organization.projects
    project = f"proj_{key.project_id}"
    stack.sql(
        "INSERT INTO accounts_modellimit (project_id, model, requests_per_minute) "
        "VALUES (%s, %s, 1)",
        key.project_id,
        "gone/50% x",
    )
    last = list(projects.rate_limits.list_rate_limits(project))[-1]
    assert (last.id, last.max_requests_per_1_minute) == ("rl-gone/50% x", 1)
    removed = {"max_requests_per_1_minute": None}
    answer = projects.rate_limits.update_rate_limit(last.id, project_id=project, extra_body=removed)
    assert (answer.model, answer.max_requests_per_1_minute) == ("gone/50% x", None)
    assert projects.retrieve(project).model_limits == []


def test_a_key_is_made_with_limits_for_models_that_a_change_replaces(organization: Any) -> None:
    projects = organization.projects
    of_demo, of_scripted = (
        {"model": "demo", "requests_per_minute": 5, "tokens_per_minute": None},
        {"model": "scripted", "concurrent_runs": 2},
    )
    project = projects.create(name="by model", extra_body={"model_limits": [of_demo]})
    made = projects.service_accounts.create(
        project.id, name="job", extra_body={"model_limits": [of_scripted, of_demo]}
    )

    def change(**fields: Any) -> Any:
        return projects.api_keys.update(made.id, project_id=project.id, extra_body=fields)

    shown = projects.api_keys.retrieve(made.id, project_id=project.id).model_limits
    assert [one["model"] for one in shown] == ["demo", "scripted"]
    assert shown[1]["concurrent_runs"] == 2
    assert [one["model"] for one in change(model_limits=[of_scripted]).model_limits] == ["scripted"]
    with ThreadPoolExecutor(4) as pool:
        both = [{"model_limits": [{**of_demo, "requests_per_minute": n}]} for n in (1, 2, 3, 4)]
        made_at_once = list(pool.map(lambda fields: change(**fields).model_limits, both))
    assert [one["requests_per_minute"] for (one,) in made_at_once] == [1, 2, 3, 4]
    assert change(model_limits=None).model_limits == []
    assert len(projects.retrieve(project.id).model_limits) == 1


def test_a_spend_limit_refuses_requests_until_it_is_raised(
    organization: Any, stack: ServedStack
) -> None:
    key = make_key(stack)
    project, limits = f"proj_{key.project_id}", organization.projects.spend_limit
    client = stack.client(key.secret)
    for missing in (limits.retrieve, limits.delete):
        with pytest.raises(openai.NotFoundError):
            missing(project)

    def set_to(cents: int, **changed: Any) -> Any:
        wanted = {"currency": "USD", "interval": "month", **changed}
        return limits.update(project, threshold_amount=cents, **wanted)

    with pytest.raises(openai.BadRequestError) as refused:
        set_to(1, currency="EUR")
    assert refused.value.param == "currency"
    limit = set_to(0)
    assert (limit.threshold_amount, limit.currency, limit.interval) == (0, "USD", "month")

    def error_code() -> str | None:
        try:
            chat(client, "demo")
        except openai.RateLimitError as exc:
            return exc.code
        return None

    wait_until(lambda: error_code() == "insufficient_quota")
    assert limits.retrieve(project).enforcement.status == "enforcing"
    stack.sql(  # As in a new month.
        "DELETE FROM accounts_budgetspend USING accounts_budget budget "
        "WHERE budget.id = budget_id AND project_id = %s",
        key.project_id,
    )
    assert limits.retrieve(project).enforcement.status == "enforcing"
    assert set_to(12_345).enforcement.status == "inactive"
    chat(client, "demo")
    (budget,) = organization.projects.retrieve(project).budgets
    assert (budget["unit"], budget["every"], budget["amount"]) == ("cost", "month", 123.45)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda cents: set_to(cents).threshold_amount, [1, 2, 3, 4]))
    assert made == [1, 2, 3, 4]
    assert limits.delete(project).deleted
    assert organization.projects.retrieve(project).budgets == []


def test_costs_by_project_and_line_item(organization: Any, stack: ServedStack) -> None:
    now = int(time.time())
    groups: Any = ["project_id", "line_item"]

    def results() -> list[Any]:
        page = organization.usage.costs(start_time=now - 3600, group_by=groups)
        return [result for bucket in page.data for result in bucket.results]

    chat(stack.client())
    wait_until(lambda: any(result.line_item == "scripted" for result in results()))
    (own, *_) = [result for result in results() if result.line_item == "scripted"]
    assert own.project_id.startswith("proj_")
    assert own.amount.currency == "usd"
    assert own.amount.value >= 0

    def found(**fields: Any) -> tuple[int, set[str]]:
        page = organization.usage.costs(start_time=now - 179 * 86_400, group_by=groups, **fields)
        return len(page.data), {one.line_item for day in page.data for one in day.results}

    days, named = found(limit=180, line_items=["scripted"])
    assert (days, named) == (180, {"scripted"})
    assert found(limit=180, line_items=["none"]) == (180, set())


def test_embeddings_are_counted_apart_from_completions(
    organization: Any, stack: ServedStack
) -> None:
    key = make_key(stack)
    project, client = f"proj_{key.project_id}", stack.client(key.secret)
    embedded = client.embeddings.create(model="demo-embedding", input=["one two", "three"])
    asked = chat(client)
    since = int(time.time()) - 3600

    def results(of: Any) -> list[Any]:
        page = of(start_time=since, project_ids=[project], group_by=["project_id", "model"])
        return [result for bucket in page.data for result in bucket.results]

    wait_until(lambda: results(organization.usage.completions))
    wait_until(lambda: results(organization.usage.embeddings))
    (one,) = results(organization.usage.embeddings)
    assert one.object == "organization.usage.embeddings.result"
    assert (one.input_tokens, one.num_model_requests) == (embedded.usage.prompt_tokens, 1)
    assert (one.project_id, one.model) == (project, "demo-embedding")
    (one,) = results(organization.usage.completions)
    assert (one.model, one.input_tokens) == ("scripted", asked.usage.prompt_tokens)
    assert results(organization.usage.moderations) == []


def test_a_key_for_the_whole_site_expires_no_later_than_the_console_said(
    organization: Any, stack: ServedStack
) -> None:
    """A key with the scope admin could make its own access endless."""
    key = make_key(stack, "admin")
    project = f"proj_{key.project_id}"
    (listed,) = organization.projects.api_keys.list(project)

    def change(**fields: Any) -> Any:
        return organization.projects.api_keys.update(
            listed.id, project_id=project, extra_body=fields
        )

    expiry = change(expires_in_seconds=3_600).expires_at
    for later in (None, 7_200):
        with pytest.raises(openai.BadRequestError, match="Only the console") as refused:
            change(expires_in_seconds=later)
        assert refused.value.param == "expires_in_seconds"
    assert change(requests_per_minute=60).expires_at == expiry
    assert change(expires_in_seconds=600).expires_at < expiry
    assert change(expires_in_seconds=None, scopes=["inference"]).expires_at is None


def test_a_key_of_a_user_who_may_not_log_in_is_shown_as_inactive(
    organization: Any, stack: ServedStack
) -> None:
    key = make_key(stack)
    project = f"proj_{key.project_id}"
    organization.projects.update(project, name=f"left {key.project_id}")  # The log gets its user.
    (listed,) = organization.projects.api_keys.list(project)
    assert listed.owner_project_access == "active"
    stack.sql(
        "UPDATE accounts_apikey SET owner_id = (SELECT id FROM auth_user WHERE NOT is_active "
        "LIMIT 1) WHERE project_id = %s",
        key.project_id,
    )
    (listed,) = organization.projects.api_keys.list(project)
    assert listed.owner_project_access == "inactive"


def test_of_two_projects_with_one_name_one_is_refused(organization: Any) -> None:
    def create(_: int) -> int:
        try:
            organization.projects.create(name="twice")
        except openai.ConflictError:
            return 409
        return 200

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(create, range(2))) == [200, 409]


@pytest.mark.parametrize("name", ["", " ", "x" * 101, "a\0b", 1])
def test_a_bad_name_is_refused(organization: Any, name: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        organization.projects.create(name=name)
    assert refused.value.param == "name"


def test_another_projects_key_and_unknown_ids_are_not_found(organization: Any) -> None:
    one, other = (organization.projects.create(name=f"of {n}") for n in range(2))
    key = organization.projects.service_accounts.create(one.id, name="k").api_key
    for project_id, key_id in ((other.id, key.id), (one.id, "key_x"), ("proj_²", key.id)):
        with pytest.raises(openai.NotFoundError):
            organization.projects.api_keys.retrieve(key_id, project_id=project_id)


def test_other_keys_may_not_use_it(client: openai.OpenAI) -> None:
    admin = client.with_options(admin_api_key=client.api_key)
    with pytest.raises(openai.PermissionDeniedError):
        admin.admin.organization.projects.list()


def test_a_secret_is_not_kept_for_a_request_that_is_sent_again(
    organization: Any, stack: ServedStack
) -> None:
    project = organization.projects.create(name="keyed")
    create = organization.projects.service_accounts.create
    headers = {"Idempotency-Key": "job"}
    secret = create(project.id, name="job", extra_headers=headers).api_key.value
    kept = stack.sql("SELECT body FROM idempotency_keyedrequest WHERE body LIKE %s", f"%{secret}%")
    assert kept == []
    with pytest.raises(openai.ConflictError) as refused:
        create(project.id, name="job", extra_headers=headers)
    assert refused.value.code == "idempotency_expired"
    assert len(list(organization.projects.api_keys.list(project.id))) == 1
