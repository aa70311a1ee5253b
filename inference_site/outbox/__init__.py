"""The outbox: events for receivers outside of the site, delivered as webhooks or by e-mail."""
