"""How a response and its events are made from deltas; state, requests and views import it."""
