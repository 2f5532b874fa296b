"""The report of a run, its plots, and the progress bar."""
