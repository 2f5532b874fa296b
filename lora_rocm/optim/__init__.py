"""Optimizers: the gated step that all share, and one update rule per optimizer."""
