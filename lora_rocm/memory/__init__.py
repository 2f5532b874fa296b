"""What a step keeps in GPU memory: counting, recompute, offload, out-of-memory recovery."""
