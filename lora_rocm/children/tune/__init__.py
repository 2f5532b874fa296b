"""Child processes that measure matrix products and attention at a recipe's shapes."""
