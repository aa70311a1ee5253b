"""Requests with an ``Idempotency-Key``: what is sent again is answered alike and runs once."""
