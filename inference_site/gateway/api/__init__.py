"""Base of the HTTP API: keys, parsing, paging, schema; only web packages import it."""
