"""The link to a model's page, as a filter."""

from __future__ import annotations

from django import template

from inference_site.catalogue.model_labels import model_link

register = template.Library()
register.filter("model_link", model_link)
