"""Event logs, request documents and endings of streams; web and worker import it."""
