"""Reads the sources of a recipe: finds files in folders, reads their metadata, and scans tables of images and texts."""
