"""Data that ships with the package: the tiny base model and the demo images."""
