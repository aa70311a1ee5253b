"""Vector stores: files split into chunks that are found by their meaning and by their words."""
