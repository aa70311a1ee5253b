"""The playground: a page on which staff try the models, and what it keeps for them."""
