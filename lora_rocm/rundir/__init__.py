"""A run directory: file names, events, heartbeat and results. Parent and worker communicate through it."""
