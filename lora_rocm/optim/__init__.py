"""Optimizers: the gated step that all of them share, and the update rule of each."""
