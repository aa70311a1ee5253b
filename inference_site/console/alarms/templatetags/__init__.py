"""Template tags of alarms."""
