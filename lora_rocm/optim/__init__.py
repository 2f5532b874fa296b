"""Optimizers: the shared gated step, and one update rule per optimizer."""
