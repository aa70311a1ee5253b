"""``Idempotency-Key``: a POST that is sent again gets the first answer and runs once."""
