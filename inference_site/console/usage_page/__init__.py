"""The home page: usage as tiles, charts and a table, in a time range that the user chooses."""
