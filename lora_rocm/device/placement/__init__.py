"""Placements of frozen weights: one protocol, and a class per kind of placement."""
