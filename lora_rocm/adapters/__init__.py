"""Adapters: the weights trained on top of a frozen base model, and the files that hold them."""
