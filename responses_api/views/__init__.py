"""The endpoints of responses and conversations, and the WebSocket; only routes import it."""
