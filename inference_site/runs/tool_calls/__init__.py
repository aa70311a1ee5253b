"""Calls of tools that the site runs: what has left a worker, and what came back."""
