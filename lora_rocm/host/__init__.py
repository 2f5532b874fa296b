"""The machine, seen without torch."""
