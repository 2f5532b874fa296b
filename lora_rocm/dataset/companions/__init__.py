"""Companions: further files that belong to an image (masks and control images), and how they are paired with it."""
