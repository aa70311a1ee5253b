"""Wire models of the chat and completion endpoints; only ``completions`` imports them."""
