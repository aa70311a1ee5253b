"""The admin site, its own pages and the playground; no other package imports it."""
