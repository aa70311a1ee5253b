"""MCP tools of a request: who may use which server, what is offered, and what is approved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import transaction
from pytest_django.fixtures import Settings

from inference_site.accounts.models import Project
from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.mcp.access import LIST_TOOLS, unseal_headers
from inference_site.mcp.models import McpServer
from inference_site.runs.queue import new_id
from responses_api import mcp_approvals
from responses_api.client_tools import OfferedTools, offer_tools
from responses_api.context import ContextItem
from responses_api.mcp import TYPE, narrow
from responses_api.mcp_approvals import answer_questions, record_questions
from responses_api.models import Item, McpApproval, StoredResponse
from responses_api.site_tools import Route
from responses_api.wire.objects import McpApprovalRequest, McpCall, McpListTools
from responses_api.wire.requests import ResponseRequest
from responses_api.wire.tools import TypedChoice, tool_object
from tests.waiting import wait_for_a_wait

pytestmark = pytest.mark.django_db

URL = "https://tools.example.org/mcp"
SECRET = "very-secret-token"
TOOLS = [
    {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
    | {"annotations": {"read_only": True}},
    {"name": "write", "description": None, "input_schema": {"type": "object"}},
]
LIST = {"type": "mcp_list_tools", "server_label": "files", "tools": TOOLS}


@pytest.fixture(autouse=True)
def _hosts(settings: Settings) -> None:
    settings.MCP_ALLOWED_HOSTS = [".example.org"]


def mcp(**fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "files", **fields}


def offered(
    project: Project,
    *tools: dict[str, Any],
    items: list[dict[str, Any]] | None = None,
    new_items: list[dict[str, Any]] | None = None,
) -> OfferedTools:
    body = ResponseRequest.model_validate({"model": "demo", "input": "x", "tools": list(tools)})
    new = new_items or []
    placed = [ContextItem(item, f"input[{i}]") for i, item in enumerate([*(items or []), *new])]
    return offer_tools(body.tools or (), placed, project_id=project.pk, new_items=new)


def refused(project: Project, tool: dict[str, Any], **more: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as raised:
        offered(project, tool, **more)
    assert SECRET not in str(raised.value)
    return raised.value.param


def test_site_without_servers_runs_no_mcp_tools(project: Project, settings: Settings) -> None:
    settings.MCP_ALLOWED_HOSTS = []
    assert offered(project, mcp(server_url=URL)).unsupported == ["mcp"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"server_url": "https://example.com/mcp"}, "server_url"),
        ({"server_url": "https://tools.example.org.evil.com/mcp"}, "server_url"),
        ({"server_url": "https://tools.example.org@evil.com/mcp"}, "server_url"),
        ({"server_url": "ftp://tools.example.org/"}, "server_url"),
        ({"server_url": "not a url"}, "server_url"),
        ({}, "server_label"),
        ({"connector_id": "connector_gmail"}, "connector_id"),
        ({"tunnel_id": "tunnel_" + 32 * "a"}, "tunnel_id"),
        ({"server_url": URL, "headers": {"Host": "x"}}, "headers"),
        ({"server_url": URL, "headers": {"X": f"{SECRET}\r\nEvil: 1"}}, "headers"),
        (
            {"server_url": URL, "authorization": SECRET, "headers": {"authorization": "x"}},
            "headers",
        ),
        (
            {"server_url": URL, "require_approval": {"never": {"read_only": True}}},
            "require_approval.never.read_only",
        ),
    ],
)
def test_what_a_request_may_not_name_is_refused_by_name(
    project: Project, fields: dict[str, Any], field: str
) -> None:
    assert refused(project, mcp(**fields)) == f"tools[0].{field}"


def test_hosts_of_a_project_narrow_those_of_the_site(project: Project) -> None:
    project.mcp_hosts = ["other.example.org"]
    project.save()
    assert refused(project, mcp(server_url=URL)) == "tools[0].server_url"
    project.mcp_hosts = ["tools.example.org"]
    project.save()
    assert offered(project, mcp(server_url=URL)).site_tools[0]["url"] == URL


def test_registered_server_is_for_its_projects(project: Project, settings: Settings) -> None:
    settings.MCP_ALLOWED_HOSTS = []
    server = McpServer.objects.create(label="files", url="http://10.0.0.1/mcp")
    assert offered(project, mcp()).site_tools[0]["server_id"] == server.pk
    assert refused(project, mcp(headers={"X": SECRET})) == "tools[0].headers"
    assert refused(project, mcp(server_url=URL)) == "tools[0].server_url"
    server.projects.add(Project.objects.create(name="another"))
    assert refused(project, mcp()) == "tools[0].server_label"
    server.projects.add(project)
    assert offered(project, mcp()).site_tools[0]["server_id"] == server.pk
    server.is_active = False
    server.save()
    assert refused(project, mcp()) == "tools[0].server_label"


def test_credentials_are_neither_stored_nor_shown(project: Project) -> None:
    tool = mcp(server_url=URL, authorization=SECRET, headers={"X-Key": SECRET})
    body = ResponseRequest.model_validate({"model": "demo", "input": "x", "tools": [tool]})
    parsed = (body.tools or [])[0]
    texts = (
        repr(body),
        body.model_dump_json(by_alias=True, exclude_unset=True),
        str(tool_object(parsed)),
        str(offered(project, tool)),
    )
    assert [SECRET in text for text in texts] == [False] * 4
    sealed = offered(project, tool).site_tools[0]["credentials"]
    assert unseal_headers(sealed) == {"X-Key": SECRET, "Authorization": f"Bearer {SECRET}"}


def test_tools_are_listed_once_in_a_chain(project: Project) -> None:
    first = offered(project, mcp(server_url=URL))
    assert [(call.route.name, call.route.namespace) for call in first.first_calls] == [
        (LIST_TOOLS, "files")
    ]
    assert not first.functions
    later = offered(project, mcp(server_url=URL), items=[LIST])
    assert not later.first_calls
    assert list(later.functions) == ["files__read", "files__write"]
    failed = offered(project, mcp(server_url=URL), items=[{**LIST, "tools": [], "error": "down"}])
    assert len(failed.first_calls) == 1


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (["read"], ["files__read"]),
        ({"tool_names": ["write"]}, ["files__write"]),
        ({"read_only": True}, ["files__read"]),
        ({"read_only": False, "tool_names": ["read"]}, []),
        ([], []),
    ],
)
def test_only_allowed_tools_are_offered(project: Project, allowed: Any, names: list[str]) -> None:
    listed = offered(project, mcp(server_url=URL, allowed_tools=allowed), items=[LIST])
    assert list(listed.functions) == names
    found = offered(project, mcp(server_url=URL, allowed_tools=allowed))
    route = found.first_calls[0].route
    TYPE.discover(route, found.site_tools[0], ToolResult("", {"tools": TOOLS}), found)
    assert list(found.functions) == names


@pytest.mark.parametrize("label", [["files"], {}, None, "files", "others"])
def test_choice_of_a_server_lists_a_deferred_one(project: Project, label: Any) -> None:
    found = offered(project, {"type": "tool_search"}, mcp(server_url=URL, defer_loading=True))
    assert not found.first_calls
    narrow(found, TypedChoice.model_validate({"type": "mcp", "server_label": label}))
    listed = [call.route.namespace for call in found.first_calls]
    assert listed == (["files"] if label in (None, "files") else [])


def test_list_of_a_client_may_be_anything(project: Project) -> None:
    tools = [1, {}, {"name": 2}, {"name": ""}, {"name": "ok", "input_schema": 3, "description": []}]
    listed = offered(project, mcp(server_url=URL), items=[{**LIST, "tools": tools}])
    assert list(listed.functions) == ["files__ok"]


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        (None, True),
        ("always", True),
        ("never", False),
        ({"never": {"tool_names": ["read"]}}, False),
        ({"never": {"tool_names": ["write"]}}, True),
        ({"always": {"tool_names": ["write"]}}, False),
        ({"always": {"tool_names": ["read"]}}, True),
        ({"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read"]}}, True),
    ],
)
def test_which_calls_need_an_approval(project: Project, given: Any, asks: bool) -> None:
    fields = {} if given is None else {"require_approval": given}
    (options,) = offered(project, mcp(server_url=URL, **fields)).site_tools
    item = TYPE.begin(Route("mcp", "read", "files"), options)
    assert isinstance(item, McpApprovalRequest) == asks


def test_items_end_with_their_results(project: Project) -> None:
    (options,) = offered(project, mcp(server_url=URL, require_approval="never")).site_tools
    call, listing = Route("mcp", "read", "files"), Route("mcp", LIST_TOOLS, "files")
    done = TYPE.end(TYPE.begin(call, options), "{}", ToolResult("42"))
    assert isinstance(done, McpCall)
    assert (done.status, done.output, done.error) == ("completed", "42", None)
    failed = TYPE.end(TYPE.begin(call, options), "{}", ToolResult("timed out", is_error=True))
    assert isinstance(failed, McpCall)
    error = {"type": "mcp_protocol_error", "code": -32000, "message": "timed out"}
    assert (failed.status, failed.output, failed.error) == ("failed", None, error)
    found = TYPE.end(TYPE.begin(listing, options), "{}", ToolResult("", {"tools": TOOLS}))
    assert isinstance(found, McpListTools)
    assert (found.tools, found.error) == (TOOLS, None)
    down = TYPE.end(TYPE.begin(listing, options), "{}", ToolResult("down", is_error=True))
    assert isinstance(down, McpListTools)
    assert (down.tools, down.error) == ([], "down")


def asked(project: Project, name: str = "write") -> str:
    """Store a response that asks to approve a call; return the id of the item."""
    item = McpApprovalRequest(
        id=new_id("mcpr_"), server_label="files", name=name, arguments='{"path": "a"}'
    )
    response = StoredResponse.objects.create(
        public_id=new_id("resp_"), project=project, model="demo", status="completed"
    )
    Item.objects.create(
        public_id=item.id,
        project=project,
        response=response,
        is_output=True,
        data=item.model_dump(exclude={"id"}),
    )
    record_questions([item])
    return item.id


def answer(id_: str, approve: Any = True) -> dict[str, Any]:
    return {"type": "mcp_approval_response", "approval_request_id": id_, "approve": approve}


def test_approved_call_has_the_stored_arguments(project: Project) -> None:
    id_ = asked(project)
    changed = {"type": "mcp_approval_request", "id": id_, "server_label": "files"}
    changed |= {"name": "write", "arguments": '{"path": "/etc/passwd"}'}
    found = offered(project, mcp(server_url=URL), items=[LIST], new_items=[changed, answer(id_)])
    (call,) = found.first_calls
    assert (call.route, call.arguments) == (Route("mcp", "write", "files"), '{"path": "a"}')
    assert call.fields == {"approval_request_id": id_}


def test_refused_call_is_not_made(project: Project) -> None:
    new = [answer(asked(project), approve=False)]
    assert not offered(project, mcp(server_url=URL), items=[LIST], new_items=new).first_calls


def test_approval_must_be_of_a_stored_question_of_the_project(project: Project) -> None:
    tool, other = mcp(server_url=URL), Project.objects.create(name="another")
    invented = "mcpr_" + 32 * "0"
    assert refused(project, tool, items=[LIST], new_items=[answer(invented)]) == "input"
    assert not offered(project, new_items=[answer(invented)]).first_calls
    assert refused(other, tool, items=[LIST], new_items=[answer(asked(project))]) == "input"
    assert refused(project, tool, items=[LIST], new_items=[answer(asked(project), 1)]) == "input"
    only_read = mcp(server_url=URL, allowed_tools=["read"])
    new = [answer(asked(project))]
    assert refused(project, only_read, items=[LIST], new_items=new) == "tools[0].allowed_tools"


def test_answer_whose_call_is_in_the_history_is_none(project: Project) -> None:
    id_ = asked(project)
    made = {"type": "mcp_call", "server_label": "files", "approval_request_id": id_}
    found = offered(project, mcp(server_url=URL), items=[LIST], new_items=[answer(id_), made])
    assert not found.first_calls


def test_changed_arguments_are_refused(project: Project) -> None:
    id_ = asked(project)
    item = Item.objects.get(public_id=id_)
    item.data["arguments"] = '{"path": "/etc/passwd"}'
    item.save()
    assert refused(project, mcp(server_url=URL), items=[LIST], new_items=[answer(id_)]) == "input"


def test_question_is_answered_once(project: Project) -> None:
    id_ = asked(project)
    first = StoredResponse.objects.create(
        public_id=new_id("resp_"), project=project, model="demo", status="in_progress"
    )
    answer_questions([answer(id_)], project.pk, first.public_id)
    with pytest.raises(InvalidRequestError) as raised:
        answer_questions([answer(id_)], project.pk, "resp_2")
    assert raised.value.code == "approval_already_answered"
    first.status = "failed"
    first.save()
    answer_questions([answer(id_, approve=False)], project.pk, "resp_3")
    row = McpApproval.objects.get()
    assert (row.approve, row.answered_by) == (False, "resp_3")


def test_answer_to_a_question_that_is_deleted_meanwhile_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a 500."""
    id_ = asked(project)
    found = mcp_approvals.questions_of([answer(id_)], project.pk)
    monkeypatch.setattr(mcp_approvals, "questions_of", lambda *_: found)
    McpApproval.objects.all().delete()
    with pytest.raises(InvalidRequestError):
        answer_questions([answer(id_)], project.pk, "resp_1")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("transactional_db")
def test_the_same_answers_in_another_order_are_no_deadlock(project: Project) -> None:
    first, second = asked(project), asked(project)

    def answer_backwards() -> None:
        with release_connection_after(), transaction.atomic():
            answer_questions([answer(second), answer(first)], project.pk, "resp_1")

    with ThreadPoolExecutor() as pool:
        with transaction.atomic():
            rows = McpApproval.objects.select_for_update(nowait=True)
            rows.get(item__public_id=first)
            other = pool.submit(answer_backwards)
            wait_for_a_wait()
            rows.get(item__public_id=second)
        other.result()
    assert set(McpApproval.objects.values_list("answered_by", flat=True)) == {"resp_1"}


def test_question_whose_call_was_made_is_not_answered_again(project: Project) -> None:
    id_ = asked(project)
    failed = StoredResponse.objects.create(
        public_id=new_id("resp_"), project=project, model="demo", status="failed"
    )
    answer_questions([answer(id_)], project.pk, failed.public_id)
    data = {"type": "mcp_call", "status": "completed", "approval_request_id": id_}
    Item.objects.create(
        public_id=new_id("mcp_"), project=project, response=failed, is_output=True, data=data
    )
    with pytest.raises(InvalidRequestError):
        answer_questions([answer(id_)], project.pk, "resp_2")


def test_approvals_go_with_their_items(project: Project) -> None:
    asked(project)
    StoredResponse.objects.get().delete()
    assert not McpApproval.objects.exists()
