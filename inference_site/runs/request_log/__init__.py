"""The request log beside the generations: refused requests, and the filters that users save."""
