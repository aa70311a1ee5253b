"""The models of the site (models file, files, database entries) and the workers that serve them."""
