"""The live workers of the site: leases, commands to workers, and where models may be loaded."""
