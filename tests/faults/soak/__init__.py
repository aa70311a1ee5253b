"""The soak: clients of every kind for half an hour, and what each process holds meanwhile."""
