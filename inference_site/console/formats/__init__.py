"""Formats of the console, by language; there is one."""
