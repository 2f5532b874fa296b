"""Memory and time of a training step, and the choice of a plan that fits the GPU."""
