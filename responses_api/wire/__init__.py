"""Wire models of responses and conversations."""
