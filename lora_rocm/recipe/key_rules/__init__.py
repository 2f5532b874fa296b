"""The rules over several keys of a recipe. Each section has its own module; ``table.py`` collects all rules."""
