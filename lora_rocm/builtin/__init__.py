"""Data that ships with the package: the tiny base models and the demo images."""
