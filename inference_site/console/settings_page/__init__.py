"""The page of settings: those that operators change here, and those of the environment."""
