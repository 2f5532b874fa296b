"""Training objectives: random draws of a step, target of the prediction, and loss."""
