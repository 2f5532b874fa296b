"""The rules over several keys of a recipe: a file for each section, the table of all in ``table.py``."""
