"""The ASGI side: relay, hub, followers, draining; the API base and all above import it."""
