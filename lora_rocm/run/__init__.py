"""A run directory and everything that watches it (light: no torch)."""
