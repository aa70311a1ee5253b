"""Single sign-on against a real provider in a process of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.db import connections
from django.test import Client

from inference_site.console.people import single_sign_on
from inference_site.console.people.login import LOGINS_PER_ADDRESS
from inference_site.console.people.models import Identity
from inference_site.console.people.single_sign_on import user_for_claims
from tests.people.oidc_provider import Provider, oidc_provider
from tests.ports import free_port

BEGIN, CALLBACK = "/admin/single-sign-on/", "/admin/single-sign-on/callback/"
BACKEND = "inference_site.console.people.single_sign_on.SingleSignOnBackend"


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with oidc_provider(f"http://testserver{CALLBACK}") as provider:
        yield provider


@pytest.fixture
def provider(running: Provider, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """The provider, which the site is set to use."""
    settings.OIDC_ISSUER = running.issuer
    settings.OIDC_CLIENT_ID = running.client_id
    settings.OIDC_CLIENT_SECRET = running.client_secret
    settings.OIDC_ROLES = {"ops": "operator", "look": "viewer"}
    settings.AUTHENTICATION_BACKENDS = [*settings.AUTHENTICATION_BACKENDS, BACKEND]
    monkeypatch.setattr(single_sign_on, "TIMEOUT_S", 120)
    monkeypatch.setattr(single_sign_on._Cache, "metadata", None)
    monkeypatch.setattr(single_sign_on._Cache, "retry_at", 0.0)
    return running


def begin(browser: Client, **asked: str) -> str:
    """Begin to sign in; return the address of the provider that the browser is sent to."""
    return browser.get(BEGIN, asked)["Location"]


def sign_in(provider: Provider, subject: str, browser: Client | None = None, **asked: str) -> Any:
    """Sign in; return the site's last answer."""
    browser = browser or Client()
    back = provider.let_in(begin(browser, **asked), subject)
    return browser.get(f"{urlsplit(back).path}?{urlsplit(back).query}")


def told(answer: Any) -> str:
    """Where a login was refused to, and with what message."""
    assert answer["Location"] == "/admin/login/"
    return str([str(message) for message in get_messages(answer.wsgi_request)])


def test_a_person_of_a_group_comes_in_with_its_role_and_goes_on(provider: Provider) -> None:
    provider.set_user(
        "s1", email="ada@example.org", email_verified=True, groups=["ops", "other"],
        preferred_username="ada", given_name="Ada",
    )  # fmt: skip
    browser = Client()
    answer = sign_in(provider, "s1", browser, next="/admin/queue/")
    assert answer["Location"] == "/admin/queue/"
    assert browser.get("/admin/queue/").status_code == 200
    assert browser.get("/admin/auth/user/").status_code == 403
    ada = User.objects.get(username="ada")
    assert (ada.email, ada.first_name, ada.is_superuser) == ("ada@example.org", "Ada", False)
    assert [group.name for group in ada.groups.all()] == ["operator"]
    assert not ada.has_usable_password()
    assert browser.session.get_expiry_age() <= 12 * 3_600
    messages = LogEntry.objects.filter(user=ada).values_list("change_message", flat=True)
    assert "Roles: empty → operator, by the groups of the provider." in messages
    assert "By single sign-on, from 127.0.0.1." in messages


def test_the_request_has_state_nonce_and_proof_key(provider: Provider) -> None:
    asked = parse_qs(urlsplit(begin(Client())).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert {"state", "nonce", "code_challenge"} <= set(asked)
    assert asked["redirect_uri"] == [f"http://testserver{CALLBACK}"]
    assert begin(Client(), next="https://evil.example/").startswith(provider.issuer)


def test_roles_follow_the_groups_and_those_that_no_group_gives_stay(
    provider: Provider, admin: Client
) -> None:
    provider.set_user("s2", email="b@example.org", email_verified=True, groups=["ops"])
    sign_in(provider, "s2")
    user = Identity.objects.get(subject="s2").user
    provider.set_user("s2", email="new@example.org", email_verified=True, groups=["look"])
    assert sign_in(provider, "s2")["Location"] == "/admin/"
    assert [group.name for group in user.groups.all()] == ["viewer"]
    provider.set_user("s2", groups=[])
    assert "None of your groups has a role" in told(sign_in(provider, "s2"))
    assert not user.groups.exists()  # Also in the sessions that they have.
    assert User.objects.filter(pk=user.pk, is_active=True).exists()


def test_a_verified_address_finds_the_user_who_was_invited(
    provider: Provider, member: Callable[..., tuple[User, Client]]
) -> None:
    ada, _ = member("ada", "administrator", email="Ada@example.org")
    provider.set_user("s3", email="ada@example.org", email_verified=True)
    assert sign_in(provider, "s3")["Location"] == "/admin/"
    assert Identity.objects.get(user=ada).subject == "s3"
    assert [group.name for group in ada.groups.all()] == ["administrator"]


@pytest.mark.parametrize("verified", [False, None, "false", "yes", 1.5])
def test_an_address_that_is_not_verified_takes_over_nobody(
    provider: Provider, member: Callable[..., tuple[User, Client]], verified: Any
) -> None:
    ada, _ = member("ada", "administrator", email="ada@example.org")
    claims = {"email": "ada@example.org", "preferred_username": "ada", "groups": ["look"]}
    provider.set_user("s4", **claims, email_verified=verified)
    browser = Client()
    assert sign_in(provider, "s4", browser)["Location"] == "/admin/"
    other = Identity.objects.get(subject="s4").user
    assert other != ada
    assert (other.username, other.email) == ("ada-2", "")
    assert browser.get("/admin/auth/user/").status_code == 403


def test_an_address_that_two_users_have_finds_neither(
    provider: Provider, member: Callable[..., tuple[User, Client]]
) -> None:
    for name in ("ada", "eve"):
        member(name, "viewer", email="ada@example.org")
    provider.set_user("s5", email="ada@example.org", email_verified=True, groups=["ops"])
    assert "Several users have your e-mail address" in told(sign_in(provider, "s5"))
    assert not Identity.objects.filter(subject="s5").exists()


def test_who_has_no_role_or_is_deactivated_stays_out(
    provider: Provider, member: Callable[..., tuple[User, Client]]
) -> None:
    provider.set_user("s6", email="x@example.org", email_verified=True, groups=["others"])
    assert "None of your groups has a role" in told(sign_in(provider, "s6"))
    assert not User.objects.filter(email="x@example.org").exists()
    ada, _ = member("ada", "viewer", email="ada@example.org", is_active=False)
    provider.set_user("s7", email="ada@example.org", email_verified=True, groups=["ops"])
    assert "deactivated" in told(sign_in(provider, "s7"))
    assert not ada.groups.filter(name="operator").exists()


def test_everybody_may_have_a_role(provider: Provider, settings: Any) -> None:
    settings.OIDC_ROLES = {"*": "viewer"}
    provider.set_user("s8", groups={"odd": 1}, preferred_username="\0" * 200, given_name=["x"])
    assert sign_in(provider, "s8")["Location"] == "/admin/"
    assert Identity.objects.get(subject="s8").user.username == "s8"


def test_a_session_ends_with_the_user(provider: Provider) -> None:
    provider.set_user("s9", groups=["ops"])
    browser = Client()
    sign_in(provider, "s9", browser)
    assert browser.get("/admin/").status_code == 200
    User.objects.filter(identities__subject="s9").update(is_active=False)
    assert browser.get("/admin/").status_code == 302


def test_a_callback_of_another_browser_or_for_the_second_time_is_refused(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    provider.set_user("s10", groups=["ops"])
    browser = Client()
    back = urlsplit(provider.let_in(begin(browser), "s10"))
    again = f"{back.path}?{back.query}"
    assert "not completed" in told(Client().get(again))
    assert browser.get(again)["Location"] == "/admin/"
    other = Client()
    begin(other)
    assert "failed" in told(other.get(again))
    code = parse_qs(back.query)["code"][0]
    assert code not in caplog.text
    assert provider.client_secret not in caplog.text


def test_a_refusal_at_the_provider_logs_nobody_out(provider: Provider, admin: Client) -> None:
    answer = admin.get(CALLBACK, {"error": "access_denied", "state": "x"})
    assert "not completed" in told(answer)
    assert admin.get("/admin/").status_code == 200


@pytest.mark.parametrize(
    ("scheme", "reason"), [("https", "[SSL: "), ("http", "Connection refused")]
)
def test_the_log_says_why_the_provider_is_not_reached(
    provider: Provider, settings: Any, caplog: pytest.LogCaptureFixture, scheme: str, reason: str
) -> None:
    port = urlsplit(provider.issuer).port if scheme == "https" else free_port()
    settings.OIDC_ISSUER = f"{scheme}://127.0.0.1:{port}"
    assert "failed" in told(Client().get(BEGIN))
    assert reason in caplog.messages[-1]


@pytest.mark.parametrize("trouble", ["frozen", "another secret", "another issuer"])
def test_a_provider_in_trouble_is_said_and_passwords_still_work(
    provider: Provider,
    member: Callable[..., tuple[User, Client]],
    settings: Any,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member("ada", "viewer")
    browser = Client()
    if trouble == "another secret":
        settings.OIDC_CLIENT_SECRET = "wrong"
        provider.set_user("s11", groups=["ops"])
        answer = sign_in(provider, "s11", browser)
    elif trouble == "another issuer":
        settings.OIDC_ISSUER = provider.issuer.replace("127.0.0.1", "localhost") + "/x"
        answer = browser.get(BEGIN)
    else:
        monkeypatch.setattr(single_sign_on, "TIMEOUT_S", 0.3)
        provider.process.send_signal(signal.SIGSTOP)
        answer = browser.get(BEGIN)
        provider.process.send_signal(signal.SIGCONT)
    assert "failed" in told(answer)
    form = {"username": "ada", "password": "a right password"}
    assert browser.post("/admin/login/", form)["Location"] == "/admin/"


@pytest.mark.django_db(transaction=True)
def test_two_logins_of_a_new_person_at_once_make_one_user(settings: Any) -> None:
    settings.OIDC_ROLES = {"*": "viewer"}
    both = threading.Barrier(2)
    found: list[int] = []

    def log_in() -> None:
        both.wait()
        claims = {"sub": "twice", "email": "t@example.org", "email_verified": True}
        found.append(user_for_claims("https://id.example.org", claims).pk)
        connections.close_all()

    threads = [threading.Thread(target=log_in) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len(set(found)) == 1


def test_it_is_off_unless_it_is_set_up(db: None) -> None:
    assert Client().get(BEGIN).status_code == 404
    assert Client().get(CALLBACK, {"code": "a", "state": "b"}).status_code == 404
    assert b"single-sign-on" not in Client().get("/admin/login/").content


def test_the_login_page_offers_it(provider: Provider) -> None:
    page = Client().get("/admin/login/", {"next": "/admin/queue/"}).content.decode()
    assert "/admin/single-sign-on/?next=%2Fadmin%2Fqueue%2F" in page


def test_an_address_does_not_begin_for_ever(provider: Provider) -> None:
    for _ in range(29):
        assert LOGINS_PER_ADDRESS.seconds_to_wait("127.0.0.1") == 0
    assert begin(Client()).startswith(provider.issuer)
    assert "Too many logins" in told(Client().get(BEGIN))
