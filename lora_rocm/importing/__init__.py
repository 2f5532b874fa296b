"""Translates the configuration of another trainer into a recipe. No foreign code runs, and torch is not imported."""
