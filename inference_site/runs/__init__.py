"""What happens to an accepted request: its generation, queue, stream, log line and usage.

Web processes and workers import it.
"""
