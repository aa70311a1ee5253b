"""Metrics, log context and traces of one process; all above ``storage`` may import it."""
