"""A site as a newcomer has it: started with a model to fetch, from a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE, REAL_MODEL
from inference_site.ops.serve.real_model import link_file
from tests.hub_server import Hub
from tests.served_stack import ServedStack, new_stack
from tests.waiting import wait_until


@pytest.fixture(scope="package")
def hub() -> Iterator[Hub]:
    """The hub that the site was told of."""
    content = DEMO_FILE.read_bytes()
    with Hub({"tiny.Q4_K_M.gguf": content, "tiny.Q8_0.gguf": content}).running() as served:
        yield served


@contextmanager
def _with_real_model(data_dir: Path) -> Iterator[Mapping[str, str]]:
    """Put a file in the place of the small real model, which tests/real runs: that takes long."""
    link_file(DEMO_FILE, data_dir / "models" / f"{REAL_MODEL}.gguf")
    yield {}


@pytest.fixture(scope="package")
def stack(hub: Hub) -> Iterator[ServedStack]:
    """What ``make serve MODEL=org/repo:Q4_K_M`` starts, without a models file."""
    env = {
        "MODELS_FILE": "",
        "DEMO_MODEL": "true",
        "MODEL": "org/repo:Q4_K_M",
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf-secret",
        "UPSTREAM_ALLOWED_HOSTS": "127.0.0.1",
    }
    with new_stack(_with_real_model, **env, SECRET_KEY="") as running:
        # The site is ready without it.
        with running.http() as http:
            path = f"/v1/models/{REAL_MODEL}"
            wait_until(lambda: http.get(path).json().get("status") == "loaded", 120)
        yield running
