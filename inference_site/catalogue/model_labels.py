"""Texts of console pages for a model and the cost of its use."""

from __future__ import annotations

from decimal import Decimal

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from inference_site.catalogue.catalogue import catalogue
from inference_site.core.admin_pages.labels import money

NO_PRICE = "no price set"
"""Shown as the cost of a model without a price."""


def is_priced(model: str) -> bool:
    """Whether the model with this id exists and has a price."""
    spec = catalogue().models.get(model)
    return spec is not None and bool(spec.price.input or spec.price.cached or spec.price.output)


def cost_label(model: str, cost: Decimal) -> str:
    """Return the cost of a model's use, or that it has no price."""
    return NO_PRICE if not cost and not is_priced(model) else money(cost)


def model_link(model: str) -> SafeString | str:
    """Return a link to the page of a model; only its id if the model no longer exists."""
    if model not in catalogue().models:
        return model
    address = reverse("admin:model", args=[model])
    return format_html('<a class="link" href="{}">{}</a>', address, model)
