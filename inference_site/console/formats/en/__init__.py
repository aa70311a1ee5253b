"""The format of dates and times on every page: ISO, with its zone."""
