"""Captions: the files that contain them, the recipe's changes to them, and their length in tokens."""
