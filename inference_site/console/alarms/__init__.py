"""Alarm rules, the alarms that they raise, and the notices that are sent to recipients."""
