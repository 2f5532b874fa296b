"""Memory of a training step: footprint, recomputation, offload, out-of-memory recovery."""
