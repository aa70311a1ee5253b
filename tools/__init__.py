"""Programs for the people who work on the source; the application imports none of them."""
