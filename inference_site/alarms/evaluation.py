"""Evaluates the rules: raises alarms, resolves them, and puts notices of both into the outbox."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import Error, connection, transaction
from django.db.models import QuerySet
from django.utils import timezone
from redis.exceptions import RedisError

from inference_site.alarms.conditions import Finding, found
from inference_site.alarms.models import Alarm, Notice, Recipient, Rule
from inference_site.generations.queue import new_id
from inference_site.storage.postgresql import cached_sql

logger = logging.getLogger(__name__)

RESOLVED_AFTER_S = 30.0
"""For how long a condition has to be false: one that comes and goes is one alarm."""
_TIMEOUT_MS = 2_000
_LOCK = "SELECT pg_try_advisory_xact_lock(0x1F5A0004)"


def evaluate() -> None:
    """Evaluate all rules once. A rule that cannot be evaluated keeps its alarms as they are."""
    rules = list(Rule.objects.all())
    looked = {rule: findings for rule in rules if (findings := _look(rule)) is not None}
    if not (any(looked.values()) or _is_any_firing()):
        return
    now = timezone.now()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_LOCK)
        if not cursor.fetchone()[0]:
            return  # Another beat does it.
        for rule, findings in looked.items():
            _apply(rule, findings, now)


@cached_sql
def _is_any_firing() -> QuerySet[Any, Any]:
    return Alarm.objects.filter(resolved_at=None).values_list("pk").order_by()[:1]


def _look(rule: Rule) -> list[Finding] | None:
    if not rule.is_enabled:
        return []
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {_TIMEOUT_MS}")
            return found(rule)
    except (Error, RedisError, OSError) as exc:
        logger.warning("the alarm rule %s could not be evaluated: %s", rule, exc)
        return None


def _apply(rule: Rule, findings: Sequence[Finding], now: dt.datetime) -> None:
    firing = {alarm.subject: alarm for alarm in rule.alarms.filter(resolved_at=None)}
    for finding in findings:
        subject, text = finding.subject[:200], finding.text[:400]
        alarm = firing.pop(subject, None)
        if alarm is None:
            raised = rule.alarms.create(subject=subject, text=text, started_at=now, seen_at=now)
            logger.warning("alarm: %s", text)
            _notify([raised], is_resolved=False)
        else:
            alarm.text, alarm.seen_at = text, now
            alarm.save(update_fields=["text", "seen_at"])
    limit = now - dt.timedelta(seconds=RESOLVED_AFTER_S)
    over = [alarm for alarm in firing.values() if alarm.seen_at < limit or not rule.is_enabled]
    Alarm.objects.filter(pk__in=[alarm.pk for alarm in over]).update(resolved_at=now)
    _notify(over, is_resolved=True)


def _notify(alarms: Iterable[Alarm], *, is_resolved: bool) -> None:
    recipients = Recipient.objects.filter(is_enabled=True)
    Notice.objects.bulk_create(
        Notice(
            alarm=alarm,
            recipient=recipient,
            is_resolved=is_resolved,
            text=alarm.text,
            public_id=new_id("msg_"),
        )
        for alarm in alarms
        for recipient in recipients
    )
