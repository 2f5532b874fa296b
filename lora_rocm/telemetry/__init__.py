"""Temperature, power and memory of a run's GPUs, read in a separate process."""
