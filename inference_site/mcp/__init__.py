"""MCP servers: which there are, who may use them, and the client of them."""
