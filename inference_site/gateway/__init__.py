"""The ASGI side of the web process: server, access log, relay, hub and delivery."""
