"""Trainers. Each has a table of its keys (``NAME.toml``) and a module with the functions that the table names."""
