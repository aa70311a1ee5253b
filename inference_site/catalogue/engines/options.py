"""The base of what only one engine understands of an entry in the models file."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from inference_site.catalogue.operator_settings import BadKey, OperatorSettings
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec


class EngineOptions(OperatorSettings):
    """The options of one engine."""

    _shows_input: ClassVar[bool] = False
    _read: ClassVar[dict[str, tuple[Any, Any]]] = {}
    """What was read last of each model, with what it was read of: every request asks for it."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return the options of a model. Raise EngineLoadError naming the model and the key."""
        given, options = cls._read.get(spec.id, (None, None))
        if given is spec.options and isinstance(options, cls):
            return options
        try:
            options = cls.read(spec.options)
        except BadKey as exc:
            raise EngineLoadError(f"Model '{spec.id}': '{'.'.join(exc.path)}': {exc}.") from exc
        cls._read[spec.id] = spec.options, options
        return options
