"""Model servers: processes of this host, which the worker starts, watches and ends."""
