"""Order and repeats of the samples in training."""
