"""Starts, follows, stops and kills child processes, on every operating system."""
