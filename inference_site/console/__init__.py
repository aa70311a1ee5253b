"""The admin site: its own pages, its menu and the playground."""
