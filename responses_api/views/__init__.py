"""The HTTP and WebSocket endpoints of responses and conversations."""
