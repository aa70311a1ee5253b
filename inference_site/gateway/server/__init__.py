"""Daphne with bounded requests and a drain; only the command `web` imports it."""
