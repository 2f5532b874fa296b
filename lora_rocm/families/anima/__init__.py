"""The Anima model family."""
