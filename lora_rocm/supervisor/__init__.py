"""The parent process of training workers: starts, hang detection, restarts, locks and resume."""
