"""Tags of the templates that the console puts on pages of other apps."""
