#!/usr/bin/env python
"""Django's command line."""

import os
import sys

from inference_site.core.process_lifecycle import collect_rarely, give_memory_back

collect_rarely()
give_memory_back()

if os.environ.get("SERVE_STATE_FD"):  # `serve` goes on, without Django.
    from inference_site.ops.serve.processes import resume

    resume()
    sys.exit()

from django.core.management import execute_from_command_line  # noqa: E402  # It is an import, too.

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    execute_from_command_line(sys.argv)
