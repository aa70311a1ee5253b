"""What each engine supports, without its library; the catalogue's users import it."""
