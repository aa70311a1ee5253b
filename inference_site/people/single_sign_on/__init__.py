"""Signing in with OpenID Connect."""
