"""The row of a generation, its queue and its kinds; web and worker import it."""
