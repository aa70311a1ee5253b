"""The people who use the console: their roles, how they come in, and what is noted of that."""
