"""Health and metrics of the whole site."""
