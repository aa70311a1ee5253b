"""Cases: stored requests that are run again on other models and settings, and compared."""
