"""Content of requests that are not stored: kept for hours, where an operator asks for it."""
