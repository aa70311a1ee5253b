"""HTTP: the server, access log, authentication, admission, and delivery of streams."""
