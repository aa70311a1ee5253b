#!/usr/bin/env python
"""Django's command line."""

import errno
import logging
import os
import signal
import sys

from inference_site.core.process_lifecycle import collect_rarely, give_large_blocks_back

collect_rarely()
give_large_blocks_back()

if os.environ.get("SERVE_STATE_FD"):  # `serve` goes on, without Django.
    from inference_site.ops.serve.processes import resume

    resume()
    sys.exit()

from django.core.management import execute_from_command_line  # noqa: E402  # It is an import, too.

_PROCESSES = frozenset({"web", "worker", "beat"})
"""They run without PostgreSQL and Redis, so an error of these is a fault of their code."""


def _main() -> None:
    """Run the command; print one line for what an operator can mend, unless ``--traceback``."""
    if sys.argv[1:2] == ["runserver"]:
        sys.exit("CommandError: Django's server cannot stream (WSGI): start `manage.py serve`.")
    if not _PROCESSES.intersection(sys.argv[1:2]):  # One line has the reason, at the end.
        logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
        logging.getLogger("inference_site.files.storage").setLevel(logging.CRITICAL)
    try:
        try:
            execute_from_command_line(sys.argv)
        finally:  # Also when a command ends by its exit status.
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # As a shell has it.
    except BrokenPipeError:  # The reader of the output has ended, as `head` does.
        if _PROCESSES.intersection(sys.argv[1:2]):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as exc:
        line = "" if "--traceback" in sys.argv else _what_to_mend(exc)
        if not line:
            raise
        sys.exit(f"CommandError: {line}")


def _what_to_mend(error: Exception) -> str:
    """Return a wrong setting, or the service that does not answer; "" for any other error."""
    from django.core.exceptions import ImproperlyConfigured

    if isinstance(error, ImproperlyConfigured):
        return f"{str(error).rstrip('.')}. See docs/settings.md."
    if isinstance(error, UnicodeEncodeError) and not " ".join(sys.argv).isprintable():
        return "An argument is not valid UTF-8."
    if _PROCESSES.intersection(sys.argv[1:2]):
        return ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "No space is left on the disk that this writes to."
    import psycopg
    from django.db.migrations.exceptions import MigrationSchemaMissing

    from inference_site.core.storage.postgresql import (
        DATABASE_UNAVAILABLE,
        NotMigrated,
        fault_of_database,
    )
    from inference_site.core.storage.redis import REDIS_UNAVAILABLE

    refusals = (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName)
    if isinstance(error, MigrationSchemaMissing) and isinstance(error.__context__, Exception):
        error = error.__context__  # The text of the other has the same in brackets.
    reason = fault_of_database(error).rstrip(".")
    if isinstance(error.__cause__, refusals):
        return f"PostgreSQL refuses this to the role of DATABASE_URL: {reason}."
    if isinstance(error.__cause__, NotMigrated):
        return f"{reason[:1].upper()}{reason[1:]}. Run `manage.py migrate`."
    if isinstance(error, DATABASE_UNAVAILABLE):
        return f"PostgreSQL cannot do this now: {reason}. `manage.py doctor` checks it."
    if isinstance(error, REDIS_UNAVAILABLE):
        return f"Redis does not answer: {reason}. `manage.py doctor` checks it."
    return ""


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    _main()
