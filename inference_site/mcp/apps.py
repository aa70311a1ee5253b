from django.apps import AppConfig


class McpConfig(AppConfig):
    """MCP servers that operators have registered."""

    name = "inference_site.mcp"
    label = "mcp_servers"
    default_auto_field = "django.db.models.BigAutoField"
