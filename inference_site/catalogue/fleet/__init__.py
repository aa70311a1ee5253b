"""The live workers of the site: leases, orders to workers, and where models may be loaded."""
