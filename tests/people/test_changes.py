"""The audit log says what a form has changed: old and new values, and no secrets."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.test import Client

from inference_site.accounts.models import ApiKey, Budget, Project, Scope
from inference_site.console.alarms.models import Rule
from inference_site.outbox.models import Endpoint


def told() -> str:
    """The latest entry of the audit log."""
    return LogEntry.objects.latest("pk").get_change_message()


def forms(prefix: str, *rows: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    """The fields of a formset."""
    found: dict[str, Any] = {f"{prefix}-TOTAL_FORMS": len(rows), f"{prefix}-INITIAL_FORMS": initial}
    for number, row in enumerate(rows):
        found |= {f"{prefix}-{number}-{name}": value for name, value in row.items()}
    return found


def test_a_project_and_its_budgets(admin: Client, project: Project) -> None:
    page = f"/admin/accounts/project/{project.pk}/change/"
    row = {"unit": "tokens", "every": "day", "amount": "5", "project": project.pk}
    no_limits = forms("model_limits")
    form = {"name": "owner", "is_active": "on", "requests_per_minute": "60", **no_limits}
    admin.post(page, form | forms("budgets", row))
    budget = Budget.objects.get()
    assert told() == f"Requests per minute: empty → 60; added budget “{budget}”"
    changed = forms("budgets", row | {"id": budget.pk, "amount": "7"}, initial=1)
    admin.post(page, {"name": "another", "requests_per_minute": "60"} | no_limits | changed)
    assert "Name: owner → another; Is active: yes → no; budget “" in told()
    assert "Amount: 5" in told()
    assert "→ 7" in told()
    gone = forms("budgets", row | {"id": budget.pk, "DELETE": "on"}, initial=1)
    admin.post(page, {"name": "another", "requests_per_minute": "60"} | no_limits | gone)
    assert told().startswith("deleted budget “")


def test_roles_and_passwords_of_users(admin: Client) -> None:
    user = User.objects.create_user("grace", is_staff=True)
    operator = Group.objects.get(name="operator")
    user.groups.add(Group.objects.get(name="viewer"))
    form = {"username": "grace", "email": "g@b.org", "is_staff": "on", "is_active": "on"}
    admin.post(f"/admin/auth/user/{user.pk}/change/", form | {"groups": [operator.pk]})
    assert told() == "Email address: empty → g@b.org; Roles: viewer → operator"
    new = {"password1": "correct horse 7", "password2": "correct horse 7"}
    admin.post(f"/admin/auth/user/{user.pk}/password/", new)
    assert told() == "password changed"
    assert "horse" not in str(LogEntry.objects.values_list("change_message"))


def test_a_key_and_a_row_of_a_list(admin: Client, api_key: tuple[ApiKey, str]) -> None:
    key = api_key[0]
    form = {"name": key.name, "scopes": [Scope.USAGE.value], "allowed_models": "demo"}
    admin.post(f"/admin/accounts/apikey/{key.pk}/change/", form)
    assert "Permissions: " in told()
    assert "→ " in told()
    assert api_key[1] not in told()
    rule = Rule.objects.order_by("pk").first() or Rule.objects.create(kind="disk", bound=90)
    admin.post(
        f"/admin/alarms/rule/{rule.pk}/change/", {"kind": rule.kind, "bound": 1, "factor": 0}
    )
    assert "Bound: " in told()
    assert "→ 1" in told()


@pytest.mark.parametrize("name", ["secret"])
def test_secrets_are_named_and_not_shown(admin: Client, name: str) -> None:
    old, new = "whsec_b2xkLXNlY3JldC1vbGQtc2VjcmV0", "whsec_bmV3LXNlY3JldC1uZXctc2VjcmV0"
    hook = Endpoint.objects.create(way="webhook", address="https://a.example/", secret=old)
    form = {"way": "webhook", "address": "https://b.example/", "is_enabled": "on", name: new}
    admin.post(f"/admin/outbox/endpoint/{hook.pk}/change/", form)
    assert told() == "Address: https://a.example/ → https://b.example/; Secret changed"
