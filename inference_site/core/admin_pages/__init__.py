"""Bases and parts that the admin pages of every app share."""
