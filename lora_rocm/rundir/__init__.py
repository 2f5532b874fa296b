"""A run directory: file names, events, heartbeat, results. It is the contract between parent and worker."""
