"""One trainer per pair of files: a table of its keys (``NAME.toml``) and the functions that the table names."""
