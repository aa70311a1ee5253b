"""An MCP server with one tool, for the clients that use such servers."""

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


server.run()
