"""Frozen values of a generation, without I/O."""
