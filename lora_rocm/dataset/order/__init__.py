"""The order in which training uses the samples, and how often it repeats them."""
