"""What a web process follows and cancels; the gateway, the API and submission import it."""
