"""Admin of the worker's models, and the base of every long list of the admin."""

from worker.admin.generations import GenerationAdmin

__all__ = ["GenerationAdmin"]
