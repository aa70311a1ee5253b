"""Real servers behind the whole product: which rows of docs/engines.md's tables they bear out."""
