"""The pages of models: one for each, the form of those kept in the database, and pulls."""
