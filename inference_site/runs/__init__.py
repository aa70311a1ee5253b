"""Generations: the row, its queue, its kinds and its maintenance; web and worker import it."""
