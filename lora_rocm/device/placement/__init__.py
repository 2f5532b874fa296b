"""Placements: where frozen weights are kept. One protocol, and a class per kind of placement."""
