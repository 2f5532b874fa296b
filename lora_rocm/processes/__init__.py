"""The toolkit for child processes: start, follow, stop and kill them, on every operating system."""
