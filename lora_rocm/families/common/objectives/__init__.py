"""Training objectives: the random draws of a step, the target of the prediction, and the loss."""
