"""The tool loop of a response, with a tool whose server counts what reaches it."""
