"""Commands of ``manage.py``, each in a fork of one process that has imported the site.

To import the site takes longer than most commands. A fork has the settings, the environment and the
working directory of the process; it has no connection, because the process itself opens none.

A line of the process's input is a JSON list of arguments; a line of its output is a list of the
exit status and what the command has printed, to its output and to its errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Manage:
    """Runs commands in forks of this process."""

    process: subprocess.Popen[str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its exit status is not checked."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        status, output, errors = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(["manage.py", *arguments], status, output, errors)


@contextmanager
def manage_forks(env: Mapping[str, str]) -> Iterator[Manage]:
    """Start the process with exactly this environment; end it."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.manage_forks"],
        cwd=_ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Manage(process)


def _run(arguments: list[str], output: int, errors: int) -> int:
    """Run a command in this process; return its exit status."""
    from django.core.management import execute_from_command_line

    os.dup2(output, 1)
    os.dup2(errors, 2)
    try:
        execute_from_command_line(["manage.py", *arguments])
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  # As Python ends a program.
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _main() -> None:
    """Run each line."""
    import django
    from django.core import checks

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    django.setup()
    checks.run_checks()  # As most commands do: it imports all pages.
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                os._exit(_run(json.loads(line), output.fileno(), errors.fileno()))
            _, status = os.waitpid(child, 0)
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read().decode())
            print(json.dumps([os.waitstatus_to_exitcode(status), *said]), flush=True)


if __name__ == "__main__":
    _main()
