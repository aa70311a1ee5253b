"""Files that clients upload, and files that the site makes for them."""
