"""Child processes that measure matrix products and attention with the tensor shapes of a recipe."""
