"""The Z-Image model family."""
