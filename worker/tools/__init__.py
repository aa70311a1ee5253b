"""Tools that the site runs for a model."""
