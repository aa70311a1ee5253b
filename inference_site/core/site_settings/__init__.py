"""Settings that operators change while the site runs; every process reads them."""
