"""Accounting and reports of usage; submission, console and commands import it."""
