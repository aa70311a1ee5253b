"""The engine ``command``: the worker starts a model's server and reads it over HTTP."""

from worker.engines.command.engine import load as load
