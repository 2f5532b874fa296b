"""The recipe: typed sections and the loader."""
