"""The admin site: its own pages, its menu, the playground, people and alarms."""
