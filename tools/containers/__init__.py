"""Checks of the stack of docker-compose.yml, built and run by a Docker engine."""
