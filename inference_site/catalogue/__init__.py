"""The models file, model discovery and GGUF headers; the fleet and all above it import it."""
