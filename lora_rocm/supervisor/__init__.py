"""The parent of the workers: processes, hang detection, restarts, locks, resume."""
