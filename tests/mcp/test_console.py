"""The console's pages of registered MCP servers: secrets, projects, and lists of tools."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.test import Client
from pytest_django.fixtures import Settings

from inference_site.accounts.models import Project
from inference_site.mcp.access import registered_endpoint, unseal_headers
from inference_site.mcp.models import McpServer
from responses_api.models import Item, McpApproval
from tests.mcp_server import running_mcp_server

LIST, ADD = "/admin/mcp_servers/mcpserver/", "/admin/mcp_servers/mcpserver/add/"
SECRET = "very-secret-token"
FORM = {
    "label": "files",
    "url": "https://files.example.org/mcp",
    "transport": "auto",
    "is_active": "on",
    "secret_headers": f"Authorization: Bearer {SECRET}\nX-Team: blue",
}


def test_credentials_are_encrypted_and_never_shown_again(admin: Client) -> None:
    assert admin.post(ADD, FORM).status_code == 302
    server = McpServer.objects.get()
    stored = {"Authorization": f"Bearer {SECRET}", "X-Team": "blue"}
    assert SECRET not in server.credentials
    assert unseal_headers(server.credentials) == stored
    page = f"{LIST}{server.pk}/change/"
    text = admin.get(page).content.decode()
    assert SECRET not in text
    assert "Authorization: (hidden)" in text
    kept = {**FORM, "secret_headers": "Authorization: (hidden)", "description": "Files."}
    assert admin.post(page, kept).status_code == 302
    server.refresh_from_db()
    assert unseal_headers(server.credentials) == {"Authorization": f"Bearer {SECRET}"}
    assert SECRET not in "".join(LogEntry.objects.values_list("change_message", flat=True))


def test_headers_that_were_not_touched_are_not_changed_in_the_audit_log(admin: Client) -> None:
    admin.post(ADD, FORM)
    server = McpServer.objects.get()
    kept = "Authorization: (hidden)\r\nX-Team: (hidden)"  # As a browser sends what the page shows.
    form = {**FORM, "secret_headers": kept, "description": "Files."}
    admin.post(f"{LIST}{server.pk}/change/", form)
    assert LogEntry.objects.latest("pk").change_message == "Description: empty → Files."


def test_credentials_do_not_follow_a_changed_address(admin: Client) -> None:
    admin.post(ADD, FORM)
    server = McpServer.objects.get()
    moved = {**FORM, "url": "https://evil.example.com/", "secret_headers": "X-Team: (hidden)"}
    answer = admin.post(f"{LIST}{server.pk}/change/", moved)
    assert "the address has changed" in answer.content.decode()
    server.refresh_from_db()
    assert server.url == FORM["url"]


def test_credentials_that_another_secret_key_encrypted_are_told_and_kept(
    admin: Client, settings: Settings
) -> None:
    admin.post(ADD, FORM)
    server = McpServer.objects.get()
    page, stored = f"{LIST}{server.pk}/change/", server.credentials
    settings.SECRET_KEY = "another"
    admin.force_login(get_user_model().objects.get())  # The session was of the other key.
    for address in (LIST, page):
        assert "were encrypted with another SECRET_KEY" in admin.get(address).content.decode()
    shown = admin.get(page).context["adminform"].form["secret_headers"].value()
    assert admin.post(page, {**FORM, "secret_headers": shown}).status_code == 302
    server.refresh_from_db()
    assert server.credentials == stored
    mixed = {**FORM, "secret_headers": f"{shown}\nX-Team: red"}
    assert "A line must be NAME: VALUE." in admin.post(page, mixed).content.decode()
    assert admin.post(page, {**FORM, "secret_headers": "X-Team: red"}).status_code == 302
    server.refresh_from_db()
    assert unseal_headers(server.credentials) == {"X-Team": "red"}


@pytest.mark.parametrize(
    "fields",
    [
        {"label": "two words"},
        {"url": "https://user:password@example.org/"},
        {"secret_headers": "no colon"},
        {"secret_headers": "Host: example.org"},
        {"projects": "abc"},
    ],
)
def test_form_refuses_what_cannot_be_used(admin: Client, fields: dict[str, str]) -> None:
    assert admin.post(ADD, {**FORM, **fields}).status_code == 200
    assert not McpServer.objects.exists()


def test_tools_are_listed_from_the_console(
    admin: Client, settings: Settings, tmp_path: Path
) -> None:
    with running_mcp_server(tmp_path) as running:
        server = McpServer.objects.create(label="test", url=f"{running.url}/mcp")
        action = {"action": "list_now", "_selected_action": [server.pk]}
        admin.post(LIST, action)
        server.refresh_from_db()
        assert "no address that may be connected to" in server.error
        settings.MCP_ALLOWED_NETWORKS = [ip_network("127.0.0.0/8")]
        admin.post(LIST, action)
    server.refresh_from_db()
    assert not server.error
    text = admin.get(f"{LIST}{server.pk}/change/").content.decode()
    assert "Adds two integers." in text
    assert server.label in admin.get(LIST).content.decode()


def test_page_of_approvals_shows_arguments_to_those_who_may_see_content(
    admin: Client, project: Project
) -> None:
    data = {"arguments": '{"path": "a"}'}
    item = Item.objects.create(public_id="mcpr_1", project=project, is_output=True, data=data)
    McpApproval.objects.create(item=item, project=project, server_label="files", name="write")
    text = admin.get("/admin/responses_api/mcpapproval/?answer=waiting").content.decode()
    assert "write" in text
    assert "path" in text
    text = admin.get("/admin/responses_api/mcpapproval/?answer=answered").content.decode()
    assert "path" not in text


def test_secret_of_an_oauth_client_is_encrypted_and_stays_with_its_servers(admin: Client) -> None:
    oauth = {"oauth_issuer": "https://login.example.org", "oauth_client_id": "site"}
    form = {**FORM, "secret_headers": "", **oauth, "oauth_client_secret": SECRET}
    assert admin.post(ADD, form).status_code == 302
    server = McpServer.objects.get()
    assert SECRET not in server.oauth_secret
    endpoint = registered_endpoint(server)
    assert endpoint.oauth is not None
    assert endpoint.oauth.client_secret == SECRET
    assert SECRET not in repr(endpoint)
    page = f"{LIST}{server.pk}/change/"
    assert SECRET not in admin.get(page).content.decode()
    kept = {**form, "oauth_client_secret": ""}
    assert admin.post(page, {**kept, "oauth_scope": "read"}).status_code == 302
    server.refresh_from_db()
    assert registered_endpoint(server).oauth == replace(endpoint.oauth, scope="read")
    moved = {**kept, "oauth_issuer": "https://evil.example.com"}
    assert "or the address is" in admin.post(page, moved).content.decode()
    assert SECRET not in "".join(LogEntry.objects.values_list("change_message", flat=True))
