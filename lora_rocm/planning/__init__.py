"""What a step takes in memory and time, and which way of keeping activations fits a card."""
