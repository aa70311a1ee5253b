"""Who a user is at the provider of the single sign-on."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Identity(models.Model):
    """An account at a provider. It finds its user at each login; e-mail and names may change."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="identities"
    )
    issuer = models.CharField(max_length=500)
    subject = models.CharField(max_length=255)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["issuer", "subject"], name="identity_once"),
        ]
        verbose_name_plural = "identities"

    def __str__(self) -> str:
        return f"{self.subject} at {self.issuer}"
