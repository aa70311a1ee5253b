"""MCP servers that operators have registered, and what users have authorised at them, encrypted."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils import timezone

from inference_site.core.storage.fields import ContentField

LABEL = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
"""What a label may be; the names of the functions that models see begin with it."""


class McpTransport(models.TextChoices):
    """The transport of the protocol that a server has."""

    AUTO = "auto", "automatic"  # SSE if the path ends with /sse or the server wants it.
    STREAMABLE_HTTP = "streamable_http", "streamable HTTP"
    SSE = "sse", "SSE"  # The older transport.


class McpServerQuerySet(models.QuerySet["McpServer"]):
    """Queries for servers."""

    def usable_by(self, project_id: int) -> McpServerQuerySet:
        """Return the active servers that a project may use."""
        return self.filter(
            models.Q(projects=None) | models.Q(projects=project_id), is_active=True
        ).distinct()


class McpServer(models.Model):
    """A server that requests name by its label, without its address or credentials.

    ``credentials`` are HTTP headers, as JSON, encrypted (see ``access``); ``oauth_secret`` is the
    secret of a client of OAuth (RFC 6749, client credentials), encrypted too. At a server that
    ``is_per_user``, that client acts for the user whose key makes a request, and ``registration``
    is the client that the site has registered if none is given (``grants``). ``tools`` is the last
    list of its tools, in the form of an ``mcp_list_tools`` item; ``error`` says why there was none
    at ``checked_at``.
    """

    label = models.CharField(
        max_length=64,
        unique=True,
        validators=[RegexValidator(rf"\A{LABEL}\Z", "A letter, then letters, digits, _ and -.")],
        help_text="The server_label of requests; names of functions begin with it.",
    )
    url = models.CharField("URL", max_length=1000)
    transport = models.CharField(
        max_length=16, choices=McpTransport.choices, default=McpTransport.AUTO
    )
    description = models.TextField(
        blank=True, max_length=2000, help_text="Shown to the model before the server's tools."
    )
    is_active = models.BooleanField(
        default=True, verbose_name="active", help_text="Requests may not name an inactive server."
    )
    is_idempotent = models.BooleanField(
        default=False,
        verbose_name="calls may be repeated",
        help_text=(
            "Whether a call whose outcome is unknown, because a worker has died, is repeated. "
            "Leave it off if a tool of the server has effects and ignores idempotency keys."
        ),
    )
    projects = models.ManyToManyField(
        "accounts.Project",
        blank=True,
        help_text="The projects that may use it. Leave empty for all of them.",
    )
    credentials = models.TextField(blank=True, editable=False)
    is_per_user = models.BooleanField(
        "each user authorises it",
        default=False,
        db_default=False,
        help_text=(
            "Users connect to it on their page My connections, and requests with a key of a user "
            "use what that user has authorised. Issuer and client ID may be left empty then: the "
            "server names its authorization server, and the site registers itself there."
        ),
    )
    oauth_issuer = models.CharField(
        "issuer",
        max_length=1000,
        blank=True,
        help_text=(
            "The authorization server, as it names itself. The site gets its tokens there with the "
            "client's ID and secret, and sends them nowhere else."
        ),
    )
    oauth_client_id = models.CharField("client ID", max_length=300, blank=True)
    oauth_secret = models.TextField(blank=True, editable=False)
    oauth_scope = models.CharField("scope", max_length=500, blank=True)
    registration = models.TextField(blank=True, default="", db_default="", editable=False)
    tools = ContentField(default=list, editable=False)
    error = models.TextField(blank=True, editable=False)
    checked_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    objects = McpServerQuerySet.as_manager()

    class Meta:
        ordering = ["label"]
        verbose_name = "MCP server"

    def __str__(self) -> str:
        return self.label

    def record_check(self, tools: list[dict[str, Any]] | None, error: str = "") -> None:
        """Save the result of a listing; the tools stay as they were if it failed.

        A server that was deleted in the meantime stays deleted.
        """
        self.checked_at, self.error = timezone.now(), error
        found: dict[str, Any] = {"checked_at": self.checked_at, "error": error}
        if tools is not None:
            self.tools = found["tools"] = tools
        McpServer.objects.filter(pk=self.pk).update(**found)


class McpConnection(models.Model):
    """What one user has authorised at one server.

    ``grant`` has the tokens, encrypted (``grants.Grant``); it is empty when they were refused, and
    ``error`` says so. It holds for ``server_url`` only, to which the user has agreed.
    """

    server = models.ForeignKey(McpServer, on_delete=models.CASCADE, related_name="connections")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="mcp_connections"
    )
    server_url = models.CharField(max_length=1000)
    grant = models.TextField(blank=True)
    error = models.CharField(max_length=300, blank=True, default="")
    connected_at = models.DateTimeField(default=timezone.now)

    class Meta:
        verbose_name = "connection to an MCP server"
        verbose_name_plural = "connections to MCP servers"
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["server", "user"], name="mcp_connection_once")
        ]

    def __str__(self) -> str:
        return f"{self.server} for {self.user}"


class EndedGrant(models.Model):
    """The tokens of a deleted connection, until the authorization server has ended them too.

    Whatever deletes a connection leaves one: its user, an operator who deletes the server, its
    user or its address. ``connections.end_grants`` tries again at ``next_at``.
    """

    grant = models.TextField()
    ended_at = models.DateTimeField(default=timezone.now)
    next_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"tokens of a connection that ended at {self.ended_at}"


@receiver(pre_delete, sender=McpConnection)
def _keep_grant(instance: McpConnection, **_: Any) -> None:
    # A worker may have refreshed the tokens since the row was read, or be about to store new ones.
    rows = McpConnection.objects.select_for_update().filter(pk=instance.pk)
    instance.grant = rows.values_list("grant", flat=True).first() or ""
    if instance.grant:
        EndedGrant.objects.create(grant=instance.grant)
