"""Checks of the images and their builds."""

from __future__ import annotations

import re
import time

from tools.containers.stack import IMAGE, Skipped, Stack, need

_CORES = "from inference_site.core.host import usable_cores; print(usable_cores())"
_NO_INDEX = "CUDA_WHEELS=http://127.0.0.1:9"


def builds_again_without_a_restart(stack: Stack) -> str:
    """An unchanged ``up --build`` leaves every container as it runs."""
    before = stack.compose("ps", "--quiet").split()
    started = time.monotonic()
    stack.compose("up", "--detach", "--build")
    need(before == stack.compose("ps", "--quiet").split(), "containers were created again")
    return f"{len(before)} containers kept, {time.monotonic() - started:.0f} s"


def threads_follow_the_quota(stack: Stack) -> str:
    """A worker counts the cores of its container's quota, not those of the host."""
    python = ("--entrypoint", "python", f"{IMAGE}-worker-cpu", "-c", _CORES)
    counts = [
        stack.command("docker", "run", "--rm", *limit, *python).strip()
        for limit in ((), ("--cpus", "0.5"))
    ]
    need(counts[1] == "0.5", f"{counts[1]} cores of 0.5")
    return f"{counts[0]} cores without a limit, {counts[1]} with --cpus 0.5"


def cuda_layers_survive_a_failed_index(stack: Stack) -> str:
    """When the index of CUDA wheels does not answer, the next build continues from there."""
    dockerfile = (stack.folder / "Dockerfile").read_text()
    has_image(stack, re.findall(r"(?m)^ARG CUDA_IMAGE=(.+)$", dockerfile)[0])
    build = ("docker", "build", "--target", "packages-cuda", "--progress", "plain", ".")
    for _ in range(2):
        said = stack.command(*build, "--build-arg", _NO_INDEX, check=False)
        need("does not answer: build again" in said, said[-1000:])
    # A line names a step with its number, a later line with that number has its result.
    packages = re.findall(r"(?m)^(#\d+) \[packages-cuda .*--excludes", said)
    need(packages and f"\n{packages[0]} CACHED" in said, said[-1000:])
    return "the second build had the packages before it"


def has_image(stack: Stack, image: str) -> None:
    """Pull an image that is not there. Raise Skipped if it cannot be had."""
    if stack.command("docker", "images", "--quiet", image) == "":
        said = stack.command("docker", "pull", "--quiet", image, check=False)
        if stack.command("docker", "images", "--quiet", image) == "":
            raise Skipped(f"{image} cannot be pulled: {said.strip()[-100:]}")
