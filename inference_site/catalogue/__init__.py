"""Which models there are (models file, database entries) and which workers serve them."""
