"""Frozen values of one generation, without I/O; everything may import them."""
