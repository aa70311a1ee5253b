"""Faults injected into a running stack under mixed clients, and what must hold after each.

``python -m tests.faults.matrix`` runs all of them and writes docs/reliability.md;
``tests/faults/test_matrix.py`` runs a short form.
"""
