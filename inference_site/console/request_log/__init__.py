"""The page of the request log: accepted and refused requests in one list."""
