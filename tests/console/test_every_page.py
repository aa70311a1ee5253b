"""What holds for every page of the admin and the console, also for those that are added."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.converters import IntConverter
from django.utils import timezone

from inference_site.accounts.models import ApiKey, Project
from inference_site.outbox.models import Endpoint
from inference_site.runs.usage.models import Period, UsageRollup
from responses_api.models import Conversation

_BEFORE_LOGIN = {
    *("admin:login", "admin:logout", "admin:jsi18n", "admin:admin_password_reset"),
    *("admin:people_reset", "admin:people_invitation"),
    "/playground",
    *("admin:single_sign_on", "admin:single_sign_on_callback"),
}
_OF_EVERY_STAFF_USER = {
    *("admin:index", "admin:search", "admin:password_change"),
    *("admin:password_change_done", "admin:autocomplete", "admin:playground"),
    *("/console/playground/responses", "/admin/playground/responses/1"),
    *("/console/playground/responses/1/stop", "/admin/playground/presets"),
}
"""Pages that need no permission; the search and ``autocomplete`` ask for one of what they find."""


def _addresses(
    patterns: Any = None, prefix: str = "/", space: str = ""
) -> Iterator[tuple[str, str]]:
    """Every name and address of the admin and the console, with 1 for each argument."""
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        address = prefix + _filled(pattern)
        if isinstance(pattern, URLResolver):
            name = f"{space}{pattern.namespace}:" if pattern.namespace else space
            yield from _addresses(pattern.url_patterns, address, name)
        elif address.startswith(("/admin/", "/console/", "/playground")):
            yield f"{space}{pattern.name or address}", address


def _filled(pattern: URLPattern | URLResolver) -> str:
    found = str(pattern.pattern).replace("^", "").replace("\\Z", "").replace("$", "")
    for name, converter in pattern.pattern.converters.items():
        kind = "int" if isinstance(converter, IntConverter) else None
        for written in (f"<{kind}:{name}>", f"<str:{name}>", f"<path:{name}>", f"<{name}>"):
            found = found.replace(written, "1")
    return found


ADDRESSES = sorted((name, address) for name, address in set(_addresses()) if "(?P" not in address)


def test_there_are_pages() -> None:
    assert len(ADDRESSES) > 60
    assert not [address for _, address in ADDRESSES if "<" in address]


def test_the_names_above_a_page_are_words() -> None:
    names = {model._meta.app_config.verbose_name for model in site._registry}
    assert [name for name in names if "_" in name] == []


@pytest.mark.django_db
def test_no_page_is_open_without_a_login() -> None:
    anybody = Client()
    for name, address in ADDRESSES:
        if name in _BEFORE_LOGIN:
            continue
        for ask in (anybody.get, anybody.post):
            answer = ask(address)
            assert answer.status_code in (302, 401, 405), (name, answer.status_code)
            assert answer.get("Location", "/admin/login/").startswith("/admin/login/"), name


def test_no_page_is_open_without_a_permission(staff: Callable[..., Client]) -> None:
    nobody = staff()
    for name, address in ADDRESSES:
        if name in _BEFORE_LOGIN | _OF_EVERY_STAFF_USER:
            continue
        for ask in (nobody.get, nobody.post):
            answer = ask(address)
            # Of an object that does not exist the way leads to the index, or to its page.
            elsewhere = answer.get("Location") in ("/admin/", f"{address}change/")
            assert elsewhere or answer.status_code in (403, 404, 405), (name, answer.status_code)


@pytest.mark.django_db
def test_no_page_takes_a_form_from_elsewhere() -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(get_user_model().objects.create_superuser("admin", ""))
    for name, address in ADDRESSES:
        answer = browser.post(address, {"action": "stop"})
        assert answer.status_code in (403, 404, 405), (name, answer.status_code)
    assert browser.get("/admin/").status_code == 200


def test_a_head_request_is_no_action_in_the_audit_log(admin: Client) -> None:
    """A client asks so whether an export is there, without getting it."""
    for name, address in ADDRESSES:
        if name not in _BEFORE_LOGIN:
            admin.head(address)
            assert not LogEntry.objects.exists(), name


PARAMETERS = [
    "q",
    "o",
    "p",
    "before",
    "after",
    "model",
    "since",
    "project",
    "key",
    "by",
    "range",
    "user",
    "tag",
]
PAGES = [
    address
    for name, address in ADDRESSES
    if name.endswith(
        ("_changelist", "_export", ":queue", ":fleet", ":index", "usage-csv", "usage-jsonl")
    )
]


ODD = ("²", "9" * 30)
LONG = "9" * 5000


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.stress)])
def test_an_odd_parameter_is_no_fault_of_the_server(
    admin: Client, api_key: tuple[ApiKey, str], is_short: bool
) -> None:
    """The short form asks each page for each parameter, with one of the odd values in turn."""
    admin.raise_request_exception = False
    parameters = (*PARAMETERS, "status__exact", "project__id__exact", "api_key")
    faults = [
        (address, parameter)
        for at, address in enumerate(PAGES)
        for number, parameter in enumerate(parameters)
        for odd in ((ODD[(at + number) % len(ODD)],) if is_short else ODD)
        if admin.get(address, {parameter: odd}).status_code >= 500
    ]
    assert faults == []


@pytest.mark.parametrize("odd", [*ODD, LONG, "0", "-1"])
def test_an_odd_page_of_the_budgets_is_the_first(admin: Client, project: Project, odd: str) -> None:
    page = f"/admin/accounts/project/{project.pk}/change/"
    formsets = [
        ask(page, {"budgets-page": odd}).context["inline_admin_formsets"][0].formset
        for ask in (admin.get, admin.post)
    ]
    assert [formset.page.number for formset in formsets] == [1, 1]


def test_no_page_offers_all_projects_users_or_endpoints(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    """Filters and forms find these by typing: there may be thousands."""
    key, _ = api_key
    Project.objects.bulk_create(Project(name=f"many-{n}") for n in range(3))
    users = get_user_model().objects
    users.bulk_create(users.model(username=f"many-{n}", is_staff=True) for n in range(3))
    Endpoint.objects.bulk_create(
        Endpoint(project=key.project, way="webhook", address=f"https://many-{n}.test")
        for n in range(3)
    )
    model = {"period": Period.DAY, "start": timezone.now(), "model": "echo", "requests": 1}
    UsageRollup.objects.create(project=key.project, api_key=key, **model)
    tables: dict[Any, set[str]] = {Project: {"add"}, Endpoint: {"add"}, users.model: {"add"}}
    for one in site._registry:
        related = {field.related_model for field in one._meta.get_fields() if field.concrete}
        if not related.isdisjoint(tables):
            tables.setdefault(one, {"changelist", "add"})
    names = {one: one._meta.label_lower.replace(".", "_") for one in tables}
    pages = {f"admin:{names[one]}_{page}" for one in tables for page in tables[one]}
    pages |= {"admin:index", "admin:requests"}
    addresses = [address for name, address in ADDRESSES if name in pages]
    assert len(addresses) == len(pages)
    assert [one for one in addresses if b"many-" in admin.get(one, follow=True).content] == []


def test_a_box_of_a_form_refuses_what_is_no_id(admin: Client) -> None:
    boxes = [(one, field) for one, of in site._registry.items() for field in of.autocomplete_fields]
    assert len(boxes) > 4
    for one, field in boxes:
        page = f"/admin/{one._meta.app_label}/{one._meta.model_name}/add/"
        assert admin.get(page, {field: "abc"}).status_code == 200
        for value in ("abc", "1\0", "9" * 20):
            form = admin.post(page, {field: value}).context["adminform"].form
            assert form.errors[field]


def test_a_filter_finds_a_project_by_typing_and_keeps_the_rest_of_the_address(
    admin: Client, api_key: tuple[ApiKey, str]
) -> None:
    key, _ = api_key
    other = Project.objects.create(name="other")
    address = f"/admin/accounts/apikey/?state=active&p=1&project__id__exact={other.pk}"
    text = admin.get(address).content.decode()
    assert f'<option value="{other.pk}" selected>other</option>' in text
    assert '<input type="hidden" name="state" value="active">' in text
    assert '<input type="hidden" name="p"' not in text
    assert key.prefix not in text
    assert '<a class="link" href="?state=active">All</a>' in text
    box = {"app_label": "accounts", "model_name": "apikey", "field_name": "project"}
    found = admin.get("/admin/autocomplete/", {**box, "term": "oth"}).json()["results"]
    assert found == [{"id": str(other.pk), "text": "other"}]


def test_what_describes_a_field_is_on_its_page(admin: Client) -> None:
    """Screen readers read the help text and the errors with the field that names them."""
    missing = {
        (address, ask.__name__, one)
        for address in ("/admin/mcp_servers/mcpserver/add/", "/admin/password_change/")
        for ask in (admin.get, admin.post)
        for text in (ask(address).content.decode(),)
        for named in re.findall(r'aria-describedby="([^"]+)"', text)
        for one in named.split()
        if f'id="{one}"' not in text
    }
    assert missing == set()


def test_only_the_number_of_an_object_is_its_id(admin: Client, api_key: tuple[ApiKey, str]) -> None:
    """In an address of the admin ``_0A`` is a line feed, which Python reads over in a number."""
    key, _ = api_key
    for table, pk in (("project", key.project_id), ("apikey", key.pk)):
        page = admin.get(f"/admin/accounts/{table}/_0A{pk}/change/")
        assert (page.status_code, page["Location"]) == (302, "/admin/")


def test_an_empty_field_of_a_popup_is_none(admin: Client, api_key: tuple[ApiKey, str]) -> None:
    role = Group.objects.create(name="a role")
    pages = [f"/admin/auth/group/{role.pk}/{view}/" for view in ("change", "delete")]
    pages.append(f"/admin/accounts/apikey/{api_key[0].pk}/change/")
    assert {one: admin.get(one, {"_to_field": ""}).status_code for one in pages} == dict.fromkeys(
        pages, 200
    )


@pytest.mark.parametrize("odd", ["abc", "", "1e3", *ODD])
def test_an_action_on_what_is_no_id_changes_nothing(
    admin: Client, api_key: tuple[ApiKey, str], odd: str
) -> None:
    form = {"action": "revoke", "_selected_action": [odd], "confirmed": "1"}
    assert admin.post("/admin/accounts/apikey/", form).status_code < 500
    key = ApiKey.objects.get(pk=api_key[0].pk)
    assert key.revoked_at is None


@pytest.mark.parametrize(
    "address",
    [
        f"generations/generation/{LONG}/change/",
        f"responses_api/conversation/{LONG}/change/",
        f"responses_api/storedresponse/?q=words&project__id__exact={LONG}",
        f"responses_api/storedresponse/?api_key={LONG}",
        f"responses_api/storedresponse/?api_key=1&project__id__exact={LONG}",
    ],
)
def test_an_id_with_more_digits_than_python_reads_is_no_fault(
    admin: Client, project: Project, address: str
) -> None:
    Project.objects.create(name="another")
    admin.raise_request_exception = False
    assert admin.get(f"/admin/{address}").status_code < 500


def test_a_conversation_is_shown_whatever_its_page_is_asked_to_begin_at(
    admin: Client, project: Project
) -> None:
    conversation = Conversation.objects.create(public_id="conv_1", project=project)
    page = admin.get(
        f"/admin/responses_api/conversation/{conversation.pk}/change/", {"before": LONG}
    )
    assert page.status_code == 200
