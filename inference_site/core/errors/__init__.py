"""API errors and the table from exceptions to them; the worker does not import it."""
