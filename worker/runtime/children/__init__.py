"""Processes of single models: how they are forked, watched, restarted, and ended when idle."""
