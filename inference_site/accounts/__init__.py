"""Projects, API keys, budgets and rate limits; any package of the web process may import it."""
