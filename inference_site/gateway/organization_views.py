"""The organization API: projects and their keys, for scripts with a key that has the scope admin.

A service account is a key here: the answer that creates it has the secret, once. Ids are those of
the usage API.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.contrib.admin.models import ADDITION, CHANGE
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.accounts.budgets import Spent, spent_of
from inference_site.accounts.keys import create_key, revoke_key
from inference_site.accounts.models import LIMITS, ApiKey, Budget, Project, Scope
from inference_site.catalogue.catalogue import catalogue
from inference_site.core.admin_pages.base_admin import log_entry_of_key
from inference_site.core.errors.api_errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import Page, PageQuery, list_object, parse_page
from inference_site.gateway.api.payload import parse_query
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.gateway.idempotency.requests import AnswerWithSecret
from inference_site.gateway.organization_limits import (
    MONTHLY,
    Amounts,
    amounts_by_model,
    amounts_of,
    change,
    change_budgets,
    change_model_limits,
    ids_of,
    limits_of,
)
from inference_site.gateway.organization_wire import (
    AccountChange,
    DeletedModelPermissions,
    DeletedProjectKey,
    DeletedServiceAccount,
    DeletedSpendLimit,
    KeyLimitsRequest,
    KeyOwner,
    KeysQuery,
    LimitsRequest,
    ModelPermissions,
    ModelPermissionsRequest,
    NewAccount,
    NewKey,
    NewProject,
    NewServiceAccount,
    ProjectChange,
    ProjectKey,
    ProjectKeyOwner,
    ProjectObject,
    ProjectRateLimit,
    ProjectsQuery,
    RateLimitChange,
    RateLimitsQuery,
    ServiceAccount,
    SpendLimit,
    SpendLimitEnforcement,
    SpendLimitRequest,
)
from inference_site.gateway.usage_views import ID_PREFIXES, primary_key_of

_OF_RATE_LIMITS = {
    "max_requests_per_1_minute": "requests_per_minute",
    "max_tokens_per_1_minute": "tokens_per_minute",
}
"""Fields of OpenAI's rate limits, and the limits that they are."""


class OrganizationView(ApiView):
    """A view for keys with the scope admin."""

    scope = Scope.ADMIN
    counts_writes = True


class ProjectsView(OrganizationView):
    """``/v1/organization/projects``."""

    @documented(answer=ProjectObject, body=NewProject, errors=(ConflictError,))
    def post(self, request: Request) -> Response:
        """Create a project."""
        given = self.parse(NewProject, request.data)
        with transaction.atomic():
            project, is_new = Project.objects.get_or_create(name=given.name)
            if not is_new:
                raise ConflictError(f"There is a project '{given.name}' already.", param="name")
            _note(request, project, ["Created", *change(project, given)], ADDITION)
        return Response(_projects([project])[0].model_dump())

    @documented(answer=ListObject[ProjectObject], query=ProjectsQuery)
    def get(self, request: Request) -> Response:
        """List the projects, the oldest first."""
        query = request.query_params
        page = parse_page(query, "asc")
        rows = Project.objects.filter(is_playground=False)
        if query.get("include_archived", "false").lower() != "true":
            rows = rows.filter(is_active=True)
        rows = page.rows_of(rows, "pk", _after(page, "project_id"))
        entries = [entry.model_dump() for entry in _projects(list(rows))]
        return Response(list_object(entries, page))


class ProjectView(OrganizationView):
    """``/v1/organization/projects/{project_id}``."""

    @documented(answer=ProjectObject)
    def get(self, request: Request, project_id: str) -> Response:
        """Get a project."""
        return Response(_projects([_find_project(project_id)])[0].model_dump())

    @documented(answer=ProjectObject, body=ProjectChange, errors=(ConflictError,))
    def post(self, request: Request, project_id: str) -> Response:
        """Rename a project, or change its limits and budgets."""
        given = self.parse(ProjectChange, request.data)
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            try:
                with transaction.atomic():
                    renamed = _rename(project, given.name)
            except IntegrityError as exc:
                message = f"There is a project '{given.name}' already."
                raise ConflictError(message, param="name") from exc
            _note(request, project, [*renamed, *change(project, given)])
            return Response(_projects([project])[0].model_dump())


class ProjectArchiveView(OrganizationView):
    """``POST /v1/organization/projects/{project_id}/archive``."""

    @documented(answer=ProjectObject)
    def post(self, request: Request, project_id: str) -> Response:
        """Archive a project: its keys are refused. An operator can activate it again."""
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            if project.pk == caller_of(request).project_id:
                raise InvalidRequestError(
                    "A key cannot archive its own project.", param="project_id"
                )
            if project.is_active:
                project.is_active = False
                project.save(update_fields=["is_active"])
                _note(request, project, ["Archived"])
        return Response(_projects([project])[0].model_dump())


class SpendLimitView(OrganizationView):
    """``/v1/organization/projects/{project_id}/spend_limit``."""

    @documented(answer=SpendLimit)
    def get(self, request: Request, project_id: str) -> Response:
        """Get the spend limit of a project."""
        return _spend_limit(_find_project(project_id))

    @documented(answer=SpendLimit, body=SpendLimitRequest)
    def post(self, request: Request, project_id: str) -> Response:
        """Set the spend limit of a project."""
        given = self.parse(SpendLimitRequest, request.data)
        if given.currency.upper() != settings.CURRENCY.upper():
            message = f"The currency of this site is {settings.CURRENCY}."
            raise InvalidRequestError(message, param="currency")
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            old = amounts_of(project)
            wanted = old | {MONTHLY: Decimal(given.threshold_amount) / 100}
            _note(request, project, change_budgets(project, old, wanted))
            return _spend_limit(project)

    @documented(answer=DeletedSpendLimit)
    def delete(self, request: Request, project_id: str) -> Response:
        """Remove the spend limit of a project."""
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            old = amounts_of(project)
            if MONTHLY not in old:
                raise _no_spend_limit()
            wanted = {bounded: amount for bounded, amount in old.items() if bounded != MONTHLY}
            _note(request, project, change_budgets(project, old, wanted))
        return Response(DeletedSpendLimit().model_dump())


class ModelPermissionsView(OrganizationView):
    """``/v1/organization/projects/{project_id}/model_permissions``."""

    @documented(answer=ModelPermissions)
    def get(self, request: Request, project_id: str) -> Response:
        """Get the models that a project may use."""
        return _model_permissions(_find_project(project_id))

    @documented(answer=ModelPermissions, body=ModelPermissionsRequest)
    def post(self, request: Request, project_id: str) -> Response:
        """Set the models that a project may use."""
        given = self.parse(ModelPermissionsRequest, request.data)
        if given.mode == "allow_list" and not given.model_ids:
            raise InvalidRequestError("An allow list must name a model.", param="model_ids")
        if given.mode == "deny_list" and given.model_ids:
            message = "This site has no deny lists: name the models that are allowed."
            raise InvalidRequestError(message, param="mode")
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            ids = ids_of(given.model_ids, project.allowed_models, "model_ids")
            _note(request, project, change(project, LimitsRequest(allowed_models=ids)))
        return _model_permissions(project)

    @documented(answer=DeletedModelPermissions)
    def delete(self, request: Request, project_id: str) -> Response:
        """Let a project use all models."""
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            _note(request, project, change(project, LimitsRequest(allowed_models=[])))
        return Response(DeletedModelPermissions().model_dump())


class RateLimitsView(OrganizationView):
    """``/v1/organization/projects/{project_id}/rate_limits``."""

    @documented(answer=ListObject[ProjectRateLimit], query=RateLimitsQuery)
    def get(self, request: Request, project_id: str) -> Response:
        """List the limits of a project for each model that it may use."""
        page = parse_page(request.query_params, "asc", default_limit=100, has_before=True)
        project = _find_project(project_id)
        entries = _rate_limits(project, amounts_by_model(project))
        if page.order == "desc":
            entries.reverse()
        shown = page.entries_of(entries, lambda entry: entry.id, "rate limit")
        return Response(list_object([entry.model_dump() for entry in shown], page))


class RateLimitView(OrganizationView):
    """``/v1/organization/projects/{project_id}/rate_limits/{rate_limit_id}``."""

    @documented(answer=ProjectRateLimit, body=RateLimitChange)
    def post(self, request: Request, project_id: str, rate_limit_id: str) -> Response:
        """Change the limits of a project for one model. Those of its keys stay."""
        given = self.parse(RateLimitChange, request.data)
        with transaction.atomic():
            project = _find_project(project_id, is_changed=True)
            kept = amounts_by_model(project)
            listed = [one.model for one in _rate_limits(project, kept) if one.id == rate_limit_id]
            if not listed:
                message = f"No such rate limit: {rate_limit_id[:100]}"
                raise NotFoundError(message, param="rate_limit_id")
            (model,) = listed
            changed = {
                ours: getattr(given, name)
                for name, ours in _OF_RATE_LIMITS.items()
                if name in given.model_fields_set
            }
            amounts = {**dict.fromkeys(LIMITS), **kept.get(model, {}), **changed}
            _note(request, project, change_model_limits(project, kept, {**kept, model: amounts}))
        return Response(_rate_limit(model, amounts).model_dump())


class ServiceAccountsView(OrganizationView):
    """``/v1/organization/projects/{project_id}/service_accounts``."""

    @documented(answer=NewServiceAccount, body=NewAccount)
    def post(self, request: Request, project_id: str) -> Response:
        """Create a key; its secret is shown once. Scopes not given are those of a new key."""
        project = _find_project(project_id)
        given = self.parse(NewAccount, request.data)
        with transaction.atomic():
            key, secret = create_key(project, given.name)
            _note(request, key, ["Created", *change(key, given)], ADDITION)
        made = NewKey(
            id=_id(key),
            name=key.name,
            value=secret,
            created_at=_time(key.created_at),
            expires_at=_optional_time(key.expires_at),
        )
        account = _account(key).model_dump()
        return AnswerWithSecret(NewServiceAccount(**account, api_key=made).model_dump())

    @documented(answer=ListObject[ServiceAccount], query=PageQuery)
    def get(self, request: Request, project_id: str) -> Response:
        """List the service accounts of a project: its keys that are not revoked."""
        page, keys = _page_of_keys(request, project_id)
        return Response(list_object([_account(key).model_dump() for key in keys], page))


class ServiceAccountView(OrganizationView):
    """``/v1/organization/projects/{project_id}/service_accounts/{key_id}``."""

    @documented(answer=ServiceAccount)
    def get(self, request: Request, project_id: str, key_id: str) -> Response:
        """Get a service account."""
        return Response(_account(_find_key(project_id, key_id)).model_dump())

    @documented(answer=ServiceAccount, body=AccountChange)
    def post(self, request: Request, project_id: str, key_id: str) -> Response:
        """Rename a service account."""
        given = self.parse(AccountChange, request.data)
        with transaction.atomic():
            key = _find_key(project_id, key_id, is_changed=True)
            _note(request, key, _rename(key, given.name))
        return Response(_account(key).model_dump())

    @documented(answer=DeletedServiceAccount)
    def delete(self, request: Request, project_id: str, key_id: str) -> Response:
        """Delete a service account: revoke its key."""
        _revoke(request, project_id, key_id)
        return Response(DeletedServiceAccount(id=key_id).model_dump())


class ProjectKeysView(OrganizationView):
    """``/v1/organization/projects/{project_id}/api_keys``."""

    @documented(answer=ListObject[ProjectKey], query=KeysQuery)
    def get(self, request: Request, project_id: str) -> Response:
        """List the keys of a project that are not revoked."""
        access = parse_query(KeysQuery, request.query_params.dict()).owner_project_access
        page, keys = _page_of_keys(request, project_id, access)
        return Response(list_object([entry.model_dump() for entry in _keys_shown(keys)], page))


class ProjectKeyView(OrganizationView):
    """``/v1/organization/projects/{project_id}/api_keys/{key_id}``."""

    @documented(answer=ProjectKey)
    def get(self, request: Request, project_id: str, key_id: str) -> Response:
        """Get a key."""
        return Response(_keys_shown([_find_key(project_id, key_id)])[0].model_dump())

    @documented(answer=ProjectKey, body=KeyLimitsRequest)
    def post(self, request: Request, project_id: str, key_id: str) -> Response:
        """Change what a key may use: scopes, models, limits, budgets, and when it expires."""
        given = self.parse(KeyLimitsRequest, request.data)
        with transaction.atomic():
            key = _find_key(project_id, key_id, is_changed=True)
            _note(request, key, change(key, given))
            return Response(_keys_shown([key])[0].model_dump())

    @documented(answer=DeletedProjectKey)
    def delete(self, request: Request, project_id: str, key_id: str) -> Response:
        """Delete a key: it is revoked, and the usage log keeps its name."""
        _revoke(request, project_id, key_id)
        return Response(DeletedProjectKey(id=key_id).model_dump())


def _page_of_keys(
    request: Request, project_id: str, access: str = "any"
) -> tuple[Page, Sequence[ApiKey]]:
    """Return a page of the keys of a project, the oldest first; ``access``: see KeysQuery."""
    page = parse_page(request.query_params, "asc")
    rows = _keys(_find_project(project_id))
    if access != "any":
        is_valid = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
        is_valid &= Q(project__is_active=True) & (Q(owner=None) | Q(owner__is_active=True))
        rows = rows.filter(is_valid if access == "active" else ~is_valid)
    return page, list(page.rows_of(rows, "pk", _after(page, "api_key_id")))


def _revoke(request: Request, project_id: str, key_id: str) -> None:
    with transaction.atomic():
        key = _find_key(project_id, key_id, is_changed=True)
        revoke_key(key)
        _note(request, key, ["Revoked"])


def _find_project(project_id: str, *, is_changed: bool = False) -> Project:
    """Return a project, and lock it if it ``is_changed``. Raise NotFoundError."""
    pk = primary_key_of(project_id, "project_id") or 0  # No row has 0.
    rows = Project.objects.filter(pk=pk, is_playground=False)
    found = (rows.select_for_update(no_key=True) if is_changed else rows).first()
    if found is None:
        raise NotFoundError(f"No such project: {project_id[:100]}", param="project_id")
    return found


def _keys(project: Project) -> QuerySet[ApiKey]:
    rows = ApiKey.objects.filter(project=project, revoked_at=None)
    return rows.select_related("project", "owner")


def _find_key(project_id: str, key_id: str, *, is_changed: bool = False) -> ApiKey:
    """Return a key of a project, and lock it if it ``is_changed``. Raise NotFoundError.

    The project is locked too, because its form in the console changes the budgets of its keys.
    """
    pk = primary_key_of(key_id, "api_key_id") or 0
    rows = _keys(_find_project(project_id, is_changed=is_changed)).filter(pk=pk)
    found = (rows.select_for_update(of=("self",), no_key=True) if is_changed else rows).first()
    if found is None:
        raise NotFoundError(f"No such key: {key_id[:100]}", param="key_id")
    return found


def _after(page: Page, name: str) -> int | None:
    """Return the primary key after which a page begins. Raise InvalidRequestError for no key."""
    if page.after is None:
        return None
    last = primary_key_of(page.after, name)
    if last is None:
        raise page.no_entry("object")
    return last


def _rename(target: Project | ApiKey, name: str | None) -> list[str]:
    """Give a project or key a new name, if there is one; return what has changed."""
    old = target.name
    if name in (None, old):
        return []
    target.name = name
    target.save(update_fields=["name"])
    return [f"Name: {old} → {name}"]


def _note(
    request: Request, target: Project | ApiKey, changes: Sequence[str], flag: int = CHANGE
) -> None:
    """Write an entry of the audit log, which names the key and the request; none for no change."""
    if not changes:
        return
    key = ApiKey.objects.get(pk=caller_of(request).api_key_id)
    request_id: str = request._request.request_id  # type: ignore[attr-defined]  # By ApiHandler.
    by = f"By the key {key.name} ({_id(key)}), request {request_id}."
    log_entry_of_key(target, f"{'; '.join(changes)}. {by}", flag)


def _id(key: ApiKey) -> str:
    return f"{ID_PREFIXES['api_key_id']}{key.pk}"


def _time(moment: dt.datetime) -> int:
    return int(moment.timestamp())


def _optional_time(moment: dt.datetime | None) -> int | None:
    return None if moment is None else _time(moment)


def _projects(projects: Sequence[Project]) -> list[ProjectObject]:
    limits = limits_of(projects)
    return [
        ProjectObject(
            id=f"{ID_PREFIXES['project_id']}{project.pk}",
            name=project.name,
            created_at=_time(project.created_at),
            archived_at=None,
            status="active" if project.is_active else "archived",
            **limits[project.pk],
        )
        for project in projects
    ]


def _spend_limit(project: Project) -> Response:
    """Answer with the spend limit of a project. Raise NotFoundError if it has none."""
    model, each, unit, every = MONTHLY
    bounded = {"model": model, "each": each, "unit": unit, "every": every}
    budget = Budget.objects.filter(project=project, api_key=None, **bounded).first()
    if budget is None:
        raise _no_spend_limit()
    spent = spent_of([budget], timezone.now()).get(budget.pk, Spent()).highest
    limit = SpendLimit(
        currency=settings.CURRENCY,
        threshold_amount=int(budget.amount * 100),
        enforcement=SpendLimitEnforcement(
            status="enforcing" if spent >= budget.amount else "inactive",
        ),
    )
    return Response(limit.model_dump())


def _model_permissions(project: Project) -> Response:
    ids = project.allowed_models
    shown = ModelPermissions(mode="allow_list" if ids else "deny_list", model_ids=ids)
    return Response(shown.model_dump())


def _rate_limits(project: Project, limits: Mapping[str, Amounts]) -> list[ProjectRateLimit]:
    """Return the ``limits`` of a project for each model that it may use, and for each other.

    It may also use the models of a route that it is allowed.
    """
    known, allowed = catalogue(), set(project.allowed_models)
    for route in known.routes.values():
        if route.id in allowed:
            allowed |= {spec.id for spec in route.specs}
    mine = [
        spec.id
        for spec in known.models.values()
        if spec.is_for(project.name) and (not allowed or spec.id in allowed)
    ]
    return [_rate_limit(model, limits.get(model, {})) for model in dict.fromkeys((*mine, *limits))]


def _rate_limit(model: str, amounts: Amounts) -> ProjectRateLimit:
    shown = {name: amounts.get(ours) for name, ours in _OF_RATE_LIMITS.items()}
    return ProjectRateLimit(id=f"rl-{model}", model=model, **shown)


def _no_spend_limit() -> NotFoundError:
    return NotFoundError("The project has no spend limit.", param="project_id")


def _account(key: ApiKey) -> ServiceAccount:
    return ServiceAccount(id=_id(key), name=key.name, created_at=_time(key.created_at))


def _keys_shown(keys: Sequence[ApiKey]) -> list[ProjectKey]:
    limits = limits_of(keys)
    return [_key(key, limits[key.pk]) for key in keys]


def _key(key: ApiKey, limits: dict[str, Any]) -> ProjectKey:
    owner = KeyOwner(id=_id(key), name=key.name, created_at=_time(key.created_at))
    is_valid = key.expires_at is None or key.expires_at > timezone.now()
    is_valid &= key.project.is_active and (key.owner is None or key.owner.is_active)
    return ProjectKey(
        id=_id(key),
        name=key.name,
        redacted_value=f"{key.prefix}…",
        created_at=_time(key.created_at),
        last_used_at=_optional_time(key.last_used_at),
        expires_at=_optional_time(key.expires_at),
        owner=ProjectKeyOwner(service_account=owner),
        owner_project_access="active" if is_valid else "inactive",
        **limits,
    )
