"""What a model that somebody else's server runs may be asked for, and its options."""

from __future__ import annotations

from inference_site.catalogue.engines.upstream_flavors import CAPABILITIES, FLAVORS
from inference_site.domain.model_spec import ModelSpec

OPTIONS = frozenset(
    {
        *("api_key", "api_key_env", "api_key_file", "base_url", "capabilities"),
        *("chat_template_kwargs", "connections", "fields", "flavor", "headers", "model"),
        "timeout_s",
    }
)


DEFAULT_FLAVOR = "openai"


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for: what is declared, else the flavor's."""
    declared = spec.options.get("capabilities")
    if isinstance(declared, list):
        return frozenset(name for name in declared if name in CAPABILITIES)
    flavor = FLAVORS.get(str(spec.options.get("flavor", DEFAULT_FLAVOR)))
    return flavor.capabilities if flavor else frozenset()
