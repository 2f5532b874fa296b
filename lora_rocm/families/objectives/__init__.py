"""What a training step is to learn: what is drawn for a sample, the target of the prediction, and the loss."""
