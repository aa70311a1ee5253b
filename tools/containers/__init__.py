"""The stack of docker-compose.yml, built and run by a Docker engine, and what it must do there."""
