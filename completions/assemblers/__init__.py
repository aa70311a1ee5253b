"""From deltas to chunks and final objects, for each kind; views and `apps.py` import it."""
