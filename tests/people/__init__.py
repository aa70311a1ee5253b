"""Tests of the people of the console."""
