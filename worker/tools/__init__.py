"""Tools that the site runs for a response: one module for each type of tool."""
