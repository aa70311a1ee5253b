"""The base of what only one engine understands of an entry in the models file."""

from __future__ import annotations

from typing import ClassVar, Self

from inference_site.catalogue.operator_settings import BadKey, OperatorSettings
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec


class EngineOptions(OperatorSettings):
    """The options of one engine."""

    _shows_input: ClassVar[bool] = False

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return the options of a model. Raise EngineLoadError naming the model and the key."""
        try:
            return cls.read(spec.options)
        except BadKey as exc:
            raise EngineLoadError(f"Model '{spec.id}': '{'.'.join(exc.path)}': {exc}.") from exc
