from django.apps import AppConfig


class PeopleConfig(AppConfig):
    """Roles, invitations, logins and single sign-on of the console's users."""

    name = "inference_site.console.people"
    label = "people"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect the receivers that write login events to the audit log."""
        from inference_site.console.people import login_log  # noqa: F401
