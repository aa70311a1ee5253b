"""What projects and keys may use, in the organization API: limits, budgets, models and scopes.

These fields are extensions of OpenAI's objects. A request changes the fields that it names; null
removes a limit.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar, get_args

from django.db.models import QuerySet
from django.utils import timezone

from inference_site.accounts.budgets import Spent, replace_budgets, spent_of
from inference_site.accounts.models import (
    END_USER,
    LIMITS,
    TAG,
    ApiKey,
    Bounded,
    Budget,
    ModelLimit,
    Project,
)
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.models_file import Route
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.site_settings.models import site_settings
from inference_site.gateway.api.payload import shown_name
from inference_site.gateway.organization_wire import (
    BudgetObject,
    BudgetRequest,
    GivenScope,
    KeyLimitsRequest,
    LimitsRequest,
    ModelLimitObject,
    ModelLimitRequest,
)
from inference_site.runs.usage.accounting import lock_budgets

_PRIORITY = "priority_requests_per_minute"
Amounts = Mapping[str, int | None]
"""The limits for one model, by ``LIMITS``."""
RowT = TypeVar("RowT", Budget, ModelLimit)
MONTHLY: Bounded = ("", "", Budget.Unit.COST, Budget.Every.MONTH)
"""The budget of a project that the API calls its spend limit."""


def change(target: Project | ApiKey, given: LimitsRequest) -> list[str]:
    """Change what the request names; return what has changed, for the audit log.

    Call this in a transaction that has locked or made the row. Raise InvalidRequestError for a
    model or dimension that does not exist, unless the row has it already, and for an expiry that
    the key may not have.
    """
    sent = given.model_fields_set
    named = [name for name in (*LIMITS, _PRIORITY) if name in sent]
    columns: dict[str, Any] = {name: getattr(given, name) for name in named}
    if "allowed_models" in sent:
        kept = target.allowed_models
        columns["allowed_models"] = ids_of(given.allowed_models or (), kept, "allowed_models")
    if isinstance(given, KeyLimitsRequest) and isinstance(target, ApiKey):
        if given.scopes is not None:
            columns["scopes"] = list(dict.fromkeys(given.scopes))
        if "expires_in_seconds" in sent:
            scopes = columns.get("scopes", target.scopes)
            columns["expires_at"] = _expiry(target, scopes, given.expires_in_seconds)
    changes = []
    for name, new in columns.items():
        old = getattr(target, name)
        if old != new:
            changes.append(f"{name.replace('_', ' ')}: {_text(old)} → {_text(new)}")
            setattr(target, name, new)
    if columns:
        target.save(update_fields=list(columns))
    if "model_limits" in sent:
        old_limits = amounts_by_model(target)
        wanted_limits = _wanted_models(given.model_limits or (), old_limits)
        changes += change_model_limits(target, old_limits, wanted_limits)
    if "budgets" in sent:
        old_amounts = amounts_of(target)
        wanted = _wanted(given.budgets or (), old_amounts)
        changes += change_budgets(target, old_amounts, wanted)
    return changes


def _owner(target: Project | ApiKey) -> tuple[int, int | None]:
    """Return the id of the project, and of the key if the target is one."""
    return (target.project_id, target.pk) if isinstance(target, ApiKey) else (target.pk, None)


def amounts_of(target: Project | ApiKey) -> dict[Bounded, Decimal]:
    """Lock the budgets of a project, and return the amounts of its own, or of those of a key.

    Call this in a transaction that has locked the row of the project, or made that of the target.
    """
    lock_budgets(_owner(target)[0])
    budgets = _budgets_of([target])[target.pk]
    return {(one.model, one.each, one.unit, one.every): one.amount for one in budgets}


def change_budgets(
    target: Project | ApiKey, old: Mapping[Bounded, Decimal], wanted: Mapping[Bounded, Decimal]
) -> list[str]:
    """Replace the ``old`` amounts of ``amounts_of``; return what has changed, for the audit log."""
    if old == wanted:
        return []
    replace_budgets(*_owner(target), wanted)
    return [f"budgets: {_budgets_text(old)} → {_budgets_text(wanted)}"]


def amounts_by_model(target: Project | ApiKey) -> dict[str, Amounts]:
    """Return the limits of a project without those of its keys, or of a key, by model."""
    rows = _limits_by_model([target])[target.pk]
    return {row.model: {name: getattr(row, name) for name in LIMITS} for row in rows}


def change_model_limits(
    target: Project | ApiKey, old: Mapping[str, Amounts], wanted: Mapping[str, Amounts]
) -> list[str]:
    """Replace the limits for models; return what has changed, for the audit log.

    ``old`` are those of ``amounts_by_model``. Call this in a transaction that has locked or made
    the row of the target.
    """
    new = {model: amounts for model, amounts in wanted.items() if set(amounts.values()) != {None}}
    if old == new:
        return []
    project_id, api_key_id = _owner(target)
    owner: dict[str, Any] = {"project_id": project_id, "api_key_id": api_key_id}
    was, now = (
        [
            ModelLimit(**owner, model=model, **amounts)
            for model, amounts in some.items()
            if old.get(model) != new.get(model)
        ]
        for some in (old, new)
    )
    ModelLimit.objects.filter(**owner).exclude(model__in=new).delete()
    ModelLimit.objects.bulk_create(
        now,
        update_conflicts=True,
        unique_fields=["project", "api_key", "model"],
        update_fields=LIMITS,
    )
    return [f"limits of models: {_text(was)} → {_text(now)}"]


def limits_of(targets: Sequence[Project] | Sequence[ApiKey]) -> dict[int, dict[str, Any]]:
    """Return the limits, budgets and models of projects or keys by id; of keys also the scopes."""
    budgets_of, models_of = _budgets_of(targets), _limits_by_model(targets)
    spent_by = spent_of([one for some in budgets_of.values() for one in some], timezone.now())
    shown: dict[int, dict[str, Any]] = {}
    for target in targets:
        of_key = (_PRIORITY, "scopes") if isinstance(target, ApiKey) else ()
        names = ("allowed_models", *LIMITS, *of_key)
        shown[target.pk] = {name: getattr(target, name) for name in names}
        shown[target.pk]["model_limits"] = [
            ModelLimitObject(model=row.model, **{name: getattr(row, name) for name in LIMITS})
            for row in models_of[target.pk]
        ]
        shown[target.pk]["budgets"] = [
            BudgetObject(
                unit=one.unit,
                every=one.every,
                amount=float(one.amount),
                model=one.model or None,
                each=one.each or None,
                spent=float(spent_by.get(one.pk, Spent()).highest),
            )
            for one in budgets_of[target.pk]
        ]
    return shown


def _budgets_of(targets: Sequence[Project | ApiKey]) -> Mapping[int, list[Budget]]:
    """Return the budgets of projects, without those of their keys, or of keys, by their ids."""
    return _by_owner(Budget.objects.order_by("pk"), targets)


def _limits_by_model(targets: Sequence[Project | ApiKey]) -> Mapping[int, list[ModelLimit]]:
    """Return the same of the limits for models."""
    return _by_owner(ModelLimit.objects.order_by("model"), targets)


def _by_owner(rows: QuerySet[RowT], targets: Sequence[Project | ApiKey]) -> dict[int, list[RowT]]:
    ids = [target.pk for target in targets]
    if any(isinstance(target, ApiKey) for target in targets):
        rows, owner = rows.filter(api_key__in=ids), "api_key_id"
    else:
        rows, owner = rows.filter(project__in=ids, api_key=None), "project_id"
    found: defaultdict[int, list[RowT]] = defaultdict(list)
    for row in rows:
        found[getattr(row, owner)].append(row)
    return found


def _wanted_models(given: Sequence[ModelLimitRequest], kept: Collection[str]) -> dict[str, Amounts]:
    """Return the limits of a request by the id of the model. Raise InvalidRequestError."""
    wanted: dict[str, Amounts] = {}
    for place, one in enumerate(given):
        param = f"model_limits[{place}].model"
        id_ = _model_id(one.model, kept, param)
        if id_ in wanted:
            message = "An earlier entry of this list is for the same model."
            raise InvalidRequestError(message, param=param)
        wanted[id_] = {name: getattr(one, name) for name in LIMITS}
    return wanted


def _wanted(given: Sequence[BudgetRequest], kept: Collection[Bounded]) -> dict[Bounded, Decimal]:
    """Return the amounts of the budgets of a request. Raise InvalidRequestError."""
    known = {"", END_USER, *(TAG + key for key in site_settings().usage_tags)}
    known |= {each for _, each, _, _ in kept}
    models = {model for model, *_ in kept}
    amounts: dict[Bounded, Decimal] = {}
    for place, one in enumerate(given):
        each, model = one.each or "", one.model or ""
        if each not in known:
            message = f"No usage is counted for '{shown_name(each)}'."
            raise InvalidRequestError(message, param=f"budgets[{place}].each")
        if model:
            model = _model_id(model, models, f"budgets[{place}].model")
        bounded = model, each, one.unit, one.every
        if bounded in amounts:
            message = "An earlier budget of this list bounds the same."
            raise InvalidRequestError(message, param=f"budgets[{place}]")
        amounts[bounded] = round(Decimal(str(one.amount)), 9)
    return amounts


def _model_id(name: str, kept: Collection[str], param: str) -> str:
    """Return the id of the model with this name, as ``_id_of``. Raise InvalidRequestError."""
    found = catalogue().holder_of(name)
    if isinstance(found, Route):
        message = f"'{found.id}' is a route: name its models, which serve its requests."
        raise InvalidRequestError(message, param=param)
    return _id_of(name, kept, param)


def ids_of(names: Sequence[str], kept: Collection[str], param: str) -> list[str]:
    """Return the ids of models and routes with these names, as ``_id_of``, each once."""
    ids = (_id_of(name, kept, f"{param}[{place}]") for place, name in enumerate(names))
    return list(dict.fromkeys(ids))


def _id_of(name: str, kept: Collection[str], param: str) -> str:
    """Return the id of the model or route with this name. Raise InvalidRequestError.

    One that is ``kept`` need not exist any more.
    """
    found = catalogue().holder_of(name)
    if found is None and name not in kept:
        message = f"No model has the name '{shown_name(name)}'."
        raise InvalidRequestError(message, param=param)
    return name if found is None else found.id


def _expiry(key: ApiKey, scopes: Collection[str], seconds: int | None) -> dt.datetime | None:
    """Return when a key with these scopes is to expire.

    Raise InvalidRequestError for an expired key, and for a later expiry of a key with a scope that
    only the console gives: a key could extend its own access to the whole site.
    """
    now, old = timezone.now(), key.expires_at
    if old is not None and old <= now:
        raise InvalidRequestError("The key has expired.", param="expires_in_seconds")
    new = None if seconds is None else now + dt.timedelta(seconds=seconds)
    if old is not None and (new is None or new > old):
        given_here = get_args(GivenScope)
        if others := [scope for scope in scopes if scope not in given_here]:
            message = f"Only the console extends a key with the scope '{others[0]}'."
            raise InvalidRequestError(message, param="expires_in_seconds")
    return new


def _budgets_text(amounts: Mapping[Bounded, Decimal]) -> str:
    budgets = (
        Budget(model=model, each=each, unit=unit, every=every, amount=amount)
        for (model, each, unit, every), amount in amounts.items()
    )
    return _text(list(budgets))


def _text(value: Any) -> str:
    """Return a value for the audit log."""
    match value:
        case None | []:
            return "none"
        case list():
            return ", ".join(map(str, value))
        case dt.datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
    return str(value)
