"""Tests of stored files."""
