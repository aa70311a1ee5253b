"""Options and capabilities of each engine, without importing its library."""
