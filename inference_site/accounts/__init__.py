"""Projects, API keys, budgets and rate limits; everything of the web may import it."""
