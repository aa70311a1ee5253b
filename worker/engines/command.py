"""The engine ``command``: the worker starts a model's server by a command of the models file.

Any server with an OpenAI-compatible API will do; ``openai_upstream`` sends it the requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from inference_site.catalogue.engines.command import CommandOptions, split_command
from inference_site.catalogue.engines.openai_upstream import FLAVORS, ServerOptions
from inference_site.core.domain.model_spec import ModelSpec
from worker.engines.base import Engine
from worker.engines.openai_upstream.engine import UpstreamEngine
from worker.engines.openai_upstream.server import Endpoint, server_of
from worker.engines.own_server import HOST, Launch, OwnServer
from worker.model_servers.process import Order, server_settings


def load(spec: ModelSpec) -> Engine:
    """Begin to start the server and return; ``Engine.starting`` is empty once it is ready."""
    options = CommandOptions.of(spec)
    launch = Launch(
        order=partial(_order, spec, options),
        connect=partial(_connected, spec),
        ready=options.ready or FLAVORS[options.flavor].ready,
        start_timeout_s=options.start_timeout_s,
        sleep_level=options.sleep,
        on_socket="{socket}" in options.command,
        has_metrics=options.flavor in ("llama_cpp", "vllm"),
    )
    return OwnServer(spec, launch)


def _order(spec: ModelSpec, options: CommandOptions, at: Endpoint) -> Order:
    gpus = ",".join(map(str, options.gpus or ()))
    values = {
        "api_key": at.key,
        "file": str(spec.file or ""),
        "gpus": gpus,
        "host": HOST,
        "id": spec.id,
        "models_dir": str(server_settings.models),
        "port": str(at.port),
        "socket": at.socket,
    }
    gpu_variables: tuple[str, ...] = ()
    if options.gpus is not None:
        gpu_variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return Order(
        name=server_settings.file_of(spec.id, "").name,
        command=split_command(options.command, values),
        env={**dict.fromkeys(gpu_variables, gpus), **options.env},
        stop_s=options.stop_timeout_s,
        stop_command=split_command(options.stop_command, values) if options.stop_command else (),
    )


def _connected(spec: ModelSpec, at: Endpoint) -> Engine:
    """Return the engine of a server that is ready."""
    options = {k: v for k, v in spec.options.items() if k in ServerOptions.model_fields}
    address = {"base_url": f"{at.root}/v1", "api_key": at.key}
    upstream = replace(spec, engine="openai_upstream", options={**options, **address})
    return UpstreamEngine(upstream, replace(server_of(upstream), socket=at.socket))
