"""The settings of the sites that tests start: passwords are hashed quickly, all else is as ever.

The usual way takes a processor for half a second, at each login and each wrong password.
"""

from __future__ import annotations

from django.conf import global_settings

from inference_site.settings import *  # noqa: F403  # All of them.

PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.MD5PasswordHasher",
    *global_settings.PASSWORD_HASHERS,
]
