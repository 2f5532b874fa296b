"""What is wrong with this machine, in order of harm, and what cures it."""
