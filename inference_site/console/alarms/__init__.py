"""Alarm rules, the alarms that they raise, and their pages."""
