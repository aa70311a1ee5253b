"""The settings of the sites that tests start: two things are quicker, all else is as ever.

Passwords: the usual way takes a processor for half a second, at each login and each wrong password.
Restarts under pytest: the suite kills processes of a site every few seconds, and would wait for
half a minute each time. That the delay grows has a test in tests/deployment/test_restarts.py; what
`make faults` and `make soak` measure is the usual delay.
"""

from __future__ import annotations

import os

from django.conf import global_settings

from inference_site.core import process_lifecycle
from inference_site.settings import *  # noqa: F403  # All of them.

PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.MD5PasswordHasher",
    *global_settings.PASSWORD_HASHERS,
]

if "PYTEST_VERSION" in os.environ:
    process_lifecycle._MAX_DELAY_S = process_lifecycle._FIRST_DELAY_S
