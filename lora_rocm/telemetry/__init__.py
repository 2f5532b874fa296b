"""Temperature, power and memory of the GPUs of a run, read beside it."""
