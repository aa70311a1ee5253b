"""MCP servers that each user authorises: connecting in the console, tokens, refreshes, liars."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from django.contrib.auth.hashers import make_password

from tests.e2e.keys import make_key
from tests.e2e.scripts import dicts
from tests.mcp.conftest import SAY, SITE_URL, McpSite, browser_of, posted
from tests.oauth_server import RunningOAuthServer, running_oauth_server
from tests.served_stack import ROOT, wait_until

PAGE = "/admin/my-connections/"
SERVERS = "/admin/mcp_servers/mcpserver/"
WHO = {"calls": [["guarded__whoami", {}]]}
TOOL = {"type": "mcp", "server_label": "guarded", "require_approval": "never"}
NOT_CONNECTED = f"Connect to 'guarded' here: {SITE_URL}{PAGE}"
REFRESH = """
import inference_site.mcp.authorization
from inference_site.mcp.connections import user_endpoint
from inference_site.mcp.models import McpServer
server = McpServer.objects.get(label="guarded")
print("ready", flush=True)
input()
print("token", user_endpoint(server, {user}).headers["Authorization"])
"""


@dataclass(frozen=True)
class Member:
    """A user with a key of their own, and their browser."""

    id: int
    key: str
    browser: httpx.Client


@pytest.fixture(scope="module")
def oauth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOAuthServer]:
    with running_oauth_server(tmp_path_factory.mktemp("oauth")) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def guarded(site: McpSite, operator: httpx.Client, oauth: RunningOAuthServer) -> None:
    """The server is registered, without an issuer and without a client."""
    register(operator, "guarded", f"{oauth.url}/mcp")


@pytest.fixture(autouse=True)
def usual(site: McpSite, oauth: RunningOAuthServer) -> Iterator[None]:
    """Tokens last, and nobody is connected afterwards."""
    oauth.control(expires_in=3600, delay_s=0)
    yield
    site.stack.sql("DELETE FROM mcp_servers_mcpconnection")


@pytest.fixture(scope="module")
def ada(site: McpSite) -> Iterator[Member]:
    with browser_of(site) as browser:
        yield make_member(site, browser, "ada")


@pytest.fixture(scope="module")
def bob(site: McpSite) -> Iterator[Member]:
    with browser_of(site) as browser:
        yield make_member(site, browser, "bob")


def make_member(site: McpSite, browser: httpx.Client, name: str) -> Member:
    ((user_id,),) = site.stack.sql(
        "INSERT INTO auth_user (username, password, is_superuser, is_staff, is_active, first_name,"
        " last_name, email, date_joined, last_login) VALUES (%s, %s, true, true, true, '', '', '',"
        " now(), now()) RETURNING id",
        *(name, make_password("a right password")),
    )
    form = {"username": name, "password": "a right password", "next": PAGE}
    assert posted(browser, "/admin/login/", "/admin/login/", form).url.path == PAGE
    return Member(user_id, make_key(site.stack, owner_id=user_id).secret, browser)


def register(operator: httpx.Client, label: str, url: str, **fields: str) -> None:
    form = {"label": label, "url": url, "transport": "auto", "is_active": "on"}
    page = f"{SERVERS}add/"
    added = posted(operator, page, page, {**form, "is_per_user": "on", **fields})
    assert "was added successfully" in added.text


def begun(site: McpSite, member: Member, label: str = "guarded") -> str:
    """Press the button; return the text of the page."""
    ((pk,),) = site.stack.sql("SELECT id FROM mcp_servers_mcpserver WHERE label = %s", label)
    return posted(member.browser, PAGE, f"{PAGE}{pk}/connect/", {}).text


def agreed(site: McpSite, page: str) -> str:
    """Agree at the authorization server; return where it sends the user, at this site."""
    link = re.search(r'rel="noreferrer" href="([^"]+)"', page)
    assert link, page
    answer = httpx.get(link[1].replace("&amp;", "&"))
    location: str = answer.headers["location"]
    assert location.startswith(f"{SITE_URL}{PAGE}back/?")
    return location.replace(SITE_URL, site.stack.url)


def connected(site: McpSite, member: Member, label: str = "guarded") -> str:
    """Connect a user; return the page that they see then."""
    return member.browser.get(agreed(site, begun(site, member, label))).text


def answer(site: McpSite, key: str) -> dict[str, Any]:
    """The first call of a response, or the list of tools if that fails."""
    with site.stack.checked():
        response = site.respond(WHO, SAY, tool=TOOL, key=key)
    assert response.status == "completed"
    listing, *items = dicts(response.output)
    found: dict[str, Any] = listing if listing.get("error") else items[0]
    return found


def test_each_user_calls_the_server_with_what_they_have_authorised(
    site: McpSite, ada: Member, bob: Member, oauth: RunningOAuthServer
) -> None:
    assert NOT_CONNECTED in answer(site, ada.key)["error"]
    page = begun(site, ada)
    assert oauth.url.removeprefix("http://") in page
    assert "Connected to guarded." in ada.browser.get(agreed(site, page)).text
    assert "Connected to guarded." in connected(site, bob)
    first, second = answer(site, ada.key)["output"], answer(site, bob.key)["output"]
    assert first.startswith("authorization ")
    assert second.startswith("authorization ")
    assert first != second
    assert len(oauth.lines("register")) == 1, "the client is registered once"
    (line,) = oauth.lines("register")
    assert line["redirect_uris"] == [f"{SITE_URL}{PAGE}back/"]


def test_a_key_of_no_user_and_a_user_who_is_not_connected_get_an_item_that_names_the_page(
    site: McpSite, ada: Member, bob: Member
) -> None:
    connected(site, ada)
    assert NOT_CONNECTED in answer(site, bob.key)["error"]
    nobody = answer(site, make_key(site.stack).secret)["error"]
    assert "this key belongs to no user" in nobody
    assert NOT_CONNECTED in nobody


def test_a_call_after_the_end_of_a_connection_has_the_error_in_its_item(
    site: McpSite, ada: Member
) -> None:
    connected(site, ada)
    first = site.respond(SAY, tool=TOOL, key=ada.key)
    site.stack.sql("DELETE FROM mcp_servers_mcpconnection")
    with site.stack.checked():
        fields: Any = {"tool": TOOL, "key": ada.key, "previous_response_id": first.id}
        second = site.respond(WHO, SAY, **fields)
    call = dicts(second.output)[0]
    assert (call["type"], call["status"]) == ("mcp_call", "failed")
    assert NOT_CONNECTED in call["error"]["message"]


def test_a_user_connects_again_after_a_change_of_the_secret_key(
    site: McpSite, ada: Member, oauth: RunningOAuthServer
) -> None:
    connected(site, ada)
    site.stack.sql("UPDATE mcp_servers_mcpserver SET registration = 'of another key'")
    site.stack.sql("UPDATE mcp_servers_mcpconnection SET \"grant\" = 'of another key'")
    page = ada.browser.get(PAGE).text
    assert "Another SECRET_KEY encrypted it. Connect again." in page
    assert NOT_CONNECTED in answer(site, ada.key)["error"]
    assert "Connected to guarded." in connected(site, ada)
    assert answer(site, ada.key)["output"].startswith("authorization ")


def test_of_many_requests_and_processes_at_once_one_refreshes(
    site: McpSite, ada: Member, oauth: RunningOAuthServer
) -> None:
    oauth.control(expires_in=1)
    connected(site, ada)
    oauth.control(expires_in=3600, delay_s=0.1)
    before = len(oauth.lines("refresh"))
    command = [sys.executable, "manage.py", "shell", "-c", REFRESH.format(user=ada.id)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, env=site.stack.env, **pipes) for _ in range(2)]
    for one in started:
        assert one.stdout is not None
        while "ready" not in one.stdout.readline():
            assert one.poll() is None
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(lambda _: answer(site, ada.key), range(4))
        said = list(pool.map(lambda one: one.communicate("\n")[0], started))
    answers = list(asked)
    assert not [one["error"] for one in answers if one.get("error")]
    assert len({one["output"] for one in answers}) == 1
    assert [text.count("token Bearer access-") for text in said] == [1, 1]
    assert len(set(said)) == 1
    assert len(oauth.lines("refresh")) == before + 1


def test_a_token_that_ends_early_is_renewed_and_a_revoked_access_asks_to_connect_again(
    site: McpSite, ada: Member, oauth: RunningOAuthServer
) -> None:
    connected(site, ada)
    said = answer(site, ada.key)["output"]
    oauth.control(forget=True)
    before = len(oauth.lines("refresh"))
    assert answer(site, ada.key)["output"] == said
    assert len(oauth.lines("refresh")) == before + 1
    oauth.control(revoke=said.split()[1])
    error = answer(site, ada.key)["error"]
    assert "has ended" in error
    assert NOT_CONNECTED in error
    assert "Connect again." in ada.browser.get(PAGE).text
    refused = len(oauth.lines("refresh"))
    answer(site, ada.key)
    assert len(oauth.lines("refresh")) == refused, "what was refused is not asked again"
    connected(site, ada)
    assert answer(site, ada.key)["output"] not in ("", said)


def test_a_state_is_of_use_in_its_session_alone_and_once(
    site: McpSite, ada: Member, bob: Member
) -> None:
    back = agreed(site, begun(site, ada))
    assert "did not begin here" in bob.browser.get(back).text
    with browser_of(site) as stranger:
        assert stranger.get(back).url.path == "/admin/login/"
    forged = re.sub("state=[^&]+", "state=x", back)
    assert "did not begin here" in ada.browser.get(forged).text
    assert site.stack.sql("SELECT 1 FROM mcp_servers_mcpconnection") == []
    assert "Connected to guarded." in ada.browser.get(back).text
    assert "did not begin here" in ada.browser.get(back).text
    assert site.stack.sql("SELECT user_id FROM mcp_servers_mcpconnection") == [(ada.id,)]


def test_an_error_of_the_authorization_server_is_shown_as_a_word(
    site: McpSite, ada: Member
) -> None:
    back = agreed(site, begun(site, ada))
    refused = re.sub("code=[^&]+", "error=access_denied", back)
    assert "answered access_denied" in ada.browser.get(refused).text
    back = agreed(site, begun(site, ada))
    hostile = re.sub("code=[^&]+", "error=<b>Send your password to evil.example</b>", back)
    text = ada.browser.get(hostile).text
    assert "answered an error" in text
    assert "evil.example" not in text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("resource", "metadata is that of another resource"),
        ("issuer", "says that it is another one"),
        ("pkce", "does not offer PKCE"),
        ("private", "no address that may be connected to"),
        ("elsewhere", "does not describe itself"),
        ("script", "does not describe itself"),
    ],
)
def test_a_server_that_lies_about_its_authorization_is_not_connected_to(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer, how: str,
    message: str,
) -> None:  # fmt: skip
    register(operator, how, f"{oauth.url}/liar/{how}/mcp")
    page = begun(site, ada, how)
    assert message in page
    assert "noreferrer" not in page


@pytest.mark.parametrize(
    ("how", "message"), [("redirect", "gave no token"), ("iss", "another authorization server")]
)
def test_a_code_goes_to_no_other_server(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer, how: str,
    message: str,
) -> None:  # fmt: skip
    register(operator, how, f"{oauth.url}/liar/{how}/mcp")
    assert message in connected(site, ada, how)
    assert oauth.lines("steal") == []
    assert site.stack.sql("SELECT 1 FROM mcp_servers_mcpconnection") == []


def test_a_registered_issuer_is_the_only_one(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer
) -> None:
    issuer = "https://login.example.org"
    register(operator, "pinned", f"{oauth.url}/mcp", oauth_issuer=issuer, oauth_client_id="site")
    assert "another authorization server than registered" in begun(site, ada, "pinned")


@pytest.mark.parametrize("method", ["client_secret_basic", "none"])
def test_a_client_that_the_operator_has_registered_is_used_as_it_is(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer, method: str
) -> None:
    back = f"{SITE_URL}{PAGE}back/"
    wanted = {"redirect_uris": [back], "token_endpoint_auth_method": method}
    client = httpx.post(f"{oauth.url}/register", json=wanted).json()
    registered = len(oauth.lines("register"))
    fields = {"oauth_issuer": oauth.url, "oauth_client_id": client["client_id"]}
    if method != "none":
        fields["oauth_client_secret"] = client["client_secret"]
    register(operator, method, f"{oauth.url}/mcp", **fields)
    assert f"Connected to {method}." in connected(site, ada, method)
    tool = {**TOOL, "server_label": method}
    called = {"calls": [[f"{method}__whoami", {}]]}
    assert dicts(site.respond(called, SAY, tool=tool, key=ada.key).output)[1]["output"]
    assert len(oauth.lines("register")) == registered


def test_a_refresh_that_ends_after_its_call_was_given_up_is_kept(
    site: McpSite, ada: Member, oauth: RunningOAuthServer
) -> None:
    oauth.control(expires_in=1)
    connected(site, ada)
    oauth.control(expires_in=3600, delay_s=6)  # A tool has 3 s here.
    before = len(oauth.lines("refresh")), len(oauth.lines("call"))
    assert "took longer than 3 s" in answer(site, ada.key)["error"]
    kept = "SELECT xmin::text FROM mcp_servers_mcpconnection"
    first = site.stack.sql(kept)
    wait_until(lambda: site.stack.sql(kept) != first, 30, "the end of the refresh")
    assert answer(site, ada.key)["output"]
    assert len(oauth.lines("refresh")) == before[0] + 1
    assert len(oauth.lines("call")) == before[1] + 1, "the call that was given up was not made"


def test_disconnecting_ends_the_access_at_the_server_too(
    site: McpSite, ada: Member, bob: Member, oauth: RunningOAuthServer
) -> None:
    connected(site, ada)
    connected(site, bob)
    ((pk,),) = site.stack.sql("SELECT id FROM mcp_servers_mcpserver WHERE label = 'guarded'")
    text = posted(ada.browser, PAGE, f"{PAGE}{pk}/end/", {}).text
    assert "Disconnected from guarded." in text
    assert oauth.lines("revoke")[-1]["token"].startswith("refresh-")
    assert NOT_CONNECTED in answer(site, ada.key)["error"]
    assert answer(site, bob.key)["output"]
    assert posted(ada.browser, PAGE, f"{PAGE}{pk}/end/", {}).status_code == 404


def test_disconnecting_during_a_refresh_ends_the_new_tokens(
    site: McpSite, ada: Member, oauth: RunningOAuthServer
) -> None:
    """The tokens before it were ended, which some servers ignore."""
    oauth.control(expires_in=1)
    connected(site, ada)
    oauth.control(expires_in=3600, delay_s=2)
    before = len(oauth.lines("refresh"))
    ((pk,),) = site.stack.sql("SELECT id FROM mcp_servers_mcpserver WHERE label = 'guarded'")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, site, ada.key)
        wait_until(lambda: len(oauth.lines("refresh")) > before, 30, "the refresh")
        posted(ada.browser, PAGE, f"{PAGE}{pk}/end/", {})
        asked.result()
    ended, refreshed = oauth.lines("revoke")[-1]["token"], oauth.lines("refresh")[before]["token"]
    assert ended.startswith("refresh-")
    assert ended != refreshed


def test_the_access_ends_at_a_deleted_server_too_once_that_can_be_asked(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer
) -> None:
    register(operator, "leaving", f"{oauth.url}/mcp")
    assert "Connected to leaving." in connected(site, ada, "leaving")
    oauth.control(no_revocation=True)
    before = len(oauth.lines("revoke"))
    ((pk,),) = site.stack.sql("SELECT id FROM mcp_servers_mcpserver WHERE label = 'leaving'")
    page = f"{SERVERS}{pk}/delete/"
    assert "was deleted successfully" in posted(operator, page, page, {"post": "yes"}).text
    wait_until(lambda: len(oauth.lines("revoke")) > before, 30, "an attempt")
    kept = "SELECT count(*) FROM mcp_servers_endedgrant"
    assert site.stack.sql(kept) == [(1,)], "the server did not end it"
    oauth.control(no_revocation=False)
    site.stack.sql("UPDATE mcp_servers_endedgrant SET next_at = now()")
    wait_until(lambda: site.stack.sql(kept) == [(0,)], 30, "the end of the access")
    assert oauth.lines("revoke")[-1]["token"].startswith("refresh-")


def test_what_was_authorised_does_not_follow_a_changed_address(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer
) -> None:
    connected(site, ada)
    revoked = len(oauth.lines("revoke"))
    ((pk,),) = site.stack.sql("SELECT id FROM mcp_servers_mcpserver WHERE label = 'guarded'")
    page = f"{SERVERS}{pk}/change/"
    form = {"label": "guarded", "transport": "auto", "is_active": "on", "is_per_user": "on"}
    moved = posted(operator, page, page, {**form, "url": f"{oauth.url}/steal"}).text
    assert "1 users must connect to it again" in moved
    assert NOT_CONNECTED in answer(site, ada.key)["error"]
    assert oauth.lines("steal") == []
    wait_until(lambda: len(oauth.lines("revoke")) > revoked, 30, "the end of the old access")
    posted(operator, page, page, {**form, "url": f"{oauth.url}/mcp"})


def test_tokens_are_nowhere_in_plain_text(
    site: McpSite, operator: httpx.Client, ada: Member, oauth: RunningOAuthServer
) -> None:
    oauth.control(expires_in=1)
    shown = connected(site, ada)
    answer(site, ada.key)
    shown += ada.browser.get(PAGE).text + operator.get("/admin/admin/logentry/").text
    secrets = re.compile(r"(access|refresh|code)-\d+")
    assert not secrets.search(shown)
    tables = site.stack.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for (table,) in tables:
        text = f"SELECT count(*) FROM \"{table}\" AS row WHERE row::text ~ '{secrets.pattern}'"  # noqa: S608
        assert site.stack.sql(text.replace(r"\d", "[0-9]")) == [(0,)], table
    assert not secrets.search(site.stack.text())
