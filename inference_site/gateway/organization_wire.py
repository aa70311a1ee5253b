"""The requests and objects of the organization API.

Source: API reference, "Projects", "Project rate limits", "Project model permissions", "Project
service accounts" and "Project API keys". Limits, budgets, models and scopes are extensions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from inference_site.gateway.api.paging import PageQuery
from inference_site.gateway.api.payload import WireObject, WireRequest

Limit = Annotated[int, Field(ge=1, lt=2**31)]

GivenScope = Literal["inference", "usage:read", "debug"]
"""The scopes that this API gives to keys; only the console gives those for the whole site."""


class BudgetRequest(WireRequest):
    """A budget: tokens, or money in the site's currency, in each day or month of UTC.

    Without a ``model`` all count. With ``each`` ("user", or "tag:" and a metadata key), each end
    user or value has this amount.
    """

    unit: Literal["tokens", "cost"]
    every: Literal["day", "month"]
    amount: Annotated[float, Field(ge=0, lt=10**11)]
    model: str | None = None
    each: str | None = None


class ModelLimitRequest(WireRequest):
    """The limits of a project or key for one model. Without any, the model has none of its own."""

    model: str
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_runs: Limit | None = None


class LimitsRequest(WireRequest):
    """The limits, budgets and models of a project or key; no ``allowed_models`` are all models."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_runs: Limit | None = None
    allowed_models: Annotated[list[str], Field(max_length=1_000)] | None = None
    model_limits: Annotated[list[ModelLimitRequest], Field(max_length=1_000)] | None = None
    budgets: Annotated[list[BudgetRequest], Field(max_length=32)] | None = None


class KeyLimitsRequest(LimitsRequest):
    """What a key may use."""

    priority_requests_per_minute: Limit | None = None
    scopes: Annotated[list[GivenScope], Field(min_length=1)] | None = None
    expires_in_seconds: Annotated[int, Field(ge=1, le=10**9)] | None = None


class BudgetObject(WireObject):
    """A budget, and what is spent of it today or in this month.

    With ``each``, that is what the end user or value with the highest amount has spent.
    """

    unit: str
    every: str
    amount: float
    model: str | None
    each: str | None
    spent: float


class ModelLimitObject(WireObject):
    """The limits of a project or key for one model; null without one."""

    model: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_runs: int | None


def _name(given: str) -> str:
    name = given.strip()
    if not 0 < len(name) <= 100 or "\0" in name:
        raise ValueError("Expected a name of 1 to 100 characters")
    return name


Name = Annotated[str, AfterValidator(_name)]


class NewProject(LimitsRequest):
    """Body of a new project."""

    name: Name


class ProjectChange(LimitsRequest):
    """Body that renames a project, or changes its limits."""

    name: Name | None = None


class NewAccount(KeyLimitsRequest):
    """Body of a new service account, which is a key."""

    name: Name
    create_service_account_only: Literal[False] | None = None


class AccountChange(WireRequest):
    """Body that renames a service account."""

    name: Name | None = None
    role: Literal["member"] | None = None


class SpendLimitRequest(WireRequest):
    """Body of the spend limit of a project: its budget in money for each month."""

    currency: str
    interval: Literal["month"]
    threshold_amount: Annotated[int, Field(ge=0, lt=10**13)]


def _not_counted(given: int | None) -> None:
    if given is not None:
        raise ValueError("This site counts requests and tokens a minute only")


_NotCounted = Annotated[int | None, AfterValidator(_not_counted)]


class RateLimitChange(WireRequest):
    """Body that changes the limits of a project for one model; null removes one."""

    max_requests_per_1_minute: Limit | None = None
    max_tokens_per_1_minute: Limit | None = None
    max_requests_per_1_day: _NotCounted = None
    max_images_per_1_minute: _NotCounted = None
    max_audio_megabytes_per_1_minute: _NotCounted = None
    batch_1_day_max_input_tokens: _NotCounted = None


class ModelPermissionsRequest(WireRequest):
    """Body of the models that a project may use; an empty deny list allows all."""

    mode: Literal["allow_list", "deny_list"]
    model_ids: Annotated[list[str], Field(max_length=1_000)]


class ProjectsQuery(PageQuery):
    """Query parameters of the list of projects."""

    include_archived: bool = Field(False, description="Whether archived projects are listed too.")


class KeysQuery(PageQuery):
    """Query parameters of the list of keys."""

    owner_project_access: Literal["active", "inactive", "any"] = Field(
        "any", description="Only keys that are valid, or that are not."
    )


class RateLimitsQuery(PageQuery):
    """Query parameters of the list of rate limits."""

    before: str | SkipJsonSchema[None] = Field(
        None, description="The id of the first entry of the next page."
    )
    limit: Annotated[int, Field(ge=1, le=100)] = 100


class ModelPermissions(WireObject):
    """The models that a project may use; an empty deny list if it may use all."""

    object: Literal["project.model_permissions"] = "project.model_permissions"
    mode: Literal["allow_list", "deny_list"]
    model_ids: list[str]


class DeletedModelPermissions(WireObject):
    """The answer of a deletion."""

    object: Literal["project.model_permissions.deleted"] = "project.model_permissions.deleted"
    deleted: Literal[True] = True


class ProjectRateLimit(WireObject):
    """The limits of a project for one model; null without one."""

    object: Literal["project.rate_limit"] = "project.rate_limit"
    id: str
    model: str
    max_requests_per_1_minute: int | None
    max_tokens_per_1_minute: int | None


class ProjectObject(WireObject):
    """A project; its limits and budgets are extensions."""

    id: str
    object: Literal["organization.project"] = "organization.project"
    name: str
    created_at: int
    archived_at: int | None
    status: Literal["active", "archived"]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_runs: int | None
    allowed_models: list[str]
    model_limits: list[ModelLimitObject]
    budgets: list[BudgetObject]


class KeyOwner(WireObject):
    """Who owns a key: always itself, as a service account."""

    id: str
    name: str
    role: Literal["member"] = "member"
    created_at: int


class ProjectKeyOwner(WireObject):
    """The owner of a key."""

    type: Literal["service_account"] = "service_account"
    service_account: KeyOwner


class ProjectKey(WireObject):
    """A key of a project, without its secret; what it may use are extensions."""

    id: str
    object: Literal["organization.project.api_key"] = "organization.project.api_key"
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    owner: ProjectKeyOwner
    owner_project_access: Literal["active", "inactive"]
    scopes: list[str]
    allowed_models: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_runs: int | None
    priority_requests_per_minute: int | None
    model_limits: list[ModelLimitObject]
    budgets: list[BudgetObject]


class ServiceAccount(WireObject):
    """A service account, which is a key."""

    id: str
    object: Literal["organization.project.service_account"] = "organization.project.service_account"
    name: str
    role: Literal["member"] = "member"
    created_at: int


class NewKey(WireObject):
    """A new key with its secret."""

    id: str
    object: Literal["organization.project.service_account.api_key"] = (
        "organization.project.service_account.api_key"
    )
    name: str
    value: str
    created_at: int
    expires_at: int | None


class NewServiceAccount(ServiceAccount):
    """A new service account, with the secret that is shown once."""

    api_key: NewKey


class DeletedServiceAccount(WireObject):
    """The answer of a deletion."""

    id: str
    object: Literal["organization.project.service_account.deleted"] = (
        "organization.project.service_account.deleted"
    )
    deleted: Literal[True] = True


class DeletedProjectKey(WireObject):
    """The answer of a deletion."""

    id: str
    object: Literal["organization.project.api_key.deleted"] = "organization.project.api_key.deleted"
    deleted: Literal[True] = True


class SpendLimitEnforcement(WireObject):
    """Whether requests are refused now, because the spend limit is used up."""

    status: Literal["inactive", "enforcing"]


class SpendLimit(WireObject):
    """The spend limit of a project; the amount is in hundredths of the currency."""

    object: Literal["project.spend_limit"] = "project.spend_limit"
    currency: str
    interval: Literal["month"] = "month"
    threshold_amount: int
    enforcement: SpendLimitEnforcement


class DeletedSpendLimit(WireObject):
    """The answer of a deletion."""

    object: Literal["project.spend_limit.deleted"] = "project.spend_limit.deleted"
    deleted: Literal[True] = True
