"""API errors, and the table from exceptions to them; web processes and workers use it."""
