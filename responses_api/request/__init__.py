"""From a request to a submission, again after a crash; the views and the admin import it."""
