"""Who may give which permissions: nobody gives, or takes over, more than they have."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Group, Permission, User
from django.db.models import Q, QuerySet


def held(user: Any) -> QuerySet[Permission]:
    """Return the permissions of a user, also of one who has been deactivated."""
    if user.is_superuser:
        return Permission.objects.all()
    return Permission.objects.filter(Q(user=user) | Q(group__user=user)).distinct()


def grantable_groups(user: Any) -> QuerySet[Group]:
    """Return the roles that hold nothing that the user does not hold."""
    beyond = Permission.objects.exclude(pk__in=held(user).values("pk"))
    return Group.objects.exclude(pk__in=Group.objects.filter(permissions__in=beyond).values("pk"))


def may_manage(user: Any, other: User) -> bool:
    """Return whether ``user`` holds all that ``other`` does."""
    if user.is_superuser:
        return True
    return not (other.is_superuser or held(other).exclude(pk__in=held(user).values("pk")).exists())
