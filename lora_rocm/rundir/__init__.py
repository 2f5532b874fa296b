"""A run directory: file names, events, heartbeat, results. The contract between parent and worker."""
