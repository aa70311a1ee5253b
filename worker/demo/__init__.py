"""Files of the demo model (weights, chat template); nothing to import."""
