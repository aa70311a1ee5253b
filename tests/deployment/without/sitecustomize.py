"""Hides packages from a process that has this directory in PYTHONPATH: an image is without them."""

import os
import sys


class _Hidden:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in os.environ["HIDDEN_MODULES"].split(","):
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)


sys.meta_path.insert(0, _Hidden())
