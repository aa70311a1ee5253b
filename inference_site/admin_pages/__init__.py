"""Parts of admin pages (keyset lists, content bubbles); every admin may import them."""
