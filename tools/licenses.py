"""The licenses of the packages in pyproject.toml, as docs/dependencies.md lists them.

``python -m tools.licenses`` prints the table. A package says its license in its metadata: as an
SPDX expression, or, if it is older, in words.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SPDX = {
    "Apache": "Apache-2.0",
    "Apache License Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD-3-Clause, Apache-2.0, dependency licenses": "BSD-3-Clause AND Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "GPL-3.0": "GPL-3.0-only",
    "MIT License": "MIT",
}
"""SPDX identifiers, by the words that packages have in their place."""
_SILENT = {"axe-playwright-python": "MIT"}
"""Packages whose metadata has no license; it is in their repository."""


def packages() -> set[str]:
    """Return the names of all packages that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(entry for extra in extras for entry in extra)]
    return {re.split(r"[~<>=;\[ ]", entry)[0] for entry in wanted}


def license_of(package: str) -> str | None:
    """Return the SPDX expression of an installed package's license, None if it is not installed."""
    try:
        fields = metadata(package)
    except PackageNotFoundError:
        return None
    if "License-Expression" in fields:
        return fields["License-Expression"]
    classifiers = [str(one) for one in fields.get_all("Classifier") or ()]
    words = [one.rpartition("::")[2].strip() for one in classifiers if one.startswith("License ")]
    short = fields["License"].partition("\n")[0] if "License" in fields else ""
    for word in (short, *words):
        if word in _SPDX or re.fullmatch(r"[A-Za-z]+-[\d.]+(-Clause)?( AND \w+)?|MIT", word):
            return _SPDX.get(word, word)
    return _SILENT.get(package)


def table(licenses: Mapping[str, str]) -> str:
    """Return the table: a row for each license, with its packages."""
    by_license = defaultdict(list)
    for package, name in licenses.items():
        by_license[name].append(package)
    rows = [
        f"| {name} | {', '.join(sorted(by_license[name], key=str.lower))} |"
        for name in sorted(by_license, key=lambda name: (-len(by_license[name]), name))
    ]
    return "\n".join(["| license | packages |", "|---|---|", *rows])


def main() -> None:
    """Print the table of the packages that are installed."""
    found = {package: license_of(package) for package in packages()}
    print(
        table({package: name for package, name in found.items() if name is not None})
    )  # Its output.


if __name__ == "__main__":
    main()
