"""Runs many commands of ``manage.py``, each in a fork of one process that has imported the site.

A line of its input is a JSON list of arguments; a line of its output is a list of the exit status
and what the command has printed. To import the site takes longer than most commands.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import django
from django.core.management import execute_from_command_line


def run(arguments: list[str], output: int) -> int:
    """Run a command in this process; return its exit status."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        execute_from_command_line(["manage.py", *arguments])
    except SystemExit as exc:
        return int(exc.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    """Run each line."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "inference_site.settings"
    django.setup()
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os._exit(run(json.loads(line), output.fileno()))
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read().decode()]))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
