"""What the console shows in place of a page: there is none, or this user may not see it."""
