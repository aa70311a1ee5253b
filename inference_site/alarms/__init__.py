"""Alarms: rules, what they have found, and the notices that are sent of it."""
