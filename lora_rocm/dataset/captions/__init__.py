"""Captions: their files, their changes by the recipe, their length in tokens."""
