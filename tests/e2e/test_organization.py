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


def chat(client: openai.OpenAI) -> Any:
    messages: Any = [{"role": "user", "content": script({"text": "yes"})}]
    return client.chat.completions.create(model="scripted", messages=messages)


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
