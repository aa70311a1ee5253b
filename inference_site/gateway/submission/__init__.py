"""From a valid request to a queued generation; the API apps import it."""
