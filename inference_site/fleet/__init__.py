"""Leases of live workers and commands to them; generations and all above import it."""
