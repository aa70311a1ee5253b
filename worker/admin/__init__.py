"""Admin of the worker's models, and the base of every long list of the admin."""

from inference_site.generations.admin import GenerationAdmin

__all__ = ["GenerationAdmin"]
