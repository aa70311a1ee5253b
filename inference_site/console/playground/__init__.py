"""The playground: a page on which staff try the models, and the presets that it saves."""
