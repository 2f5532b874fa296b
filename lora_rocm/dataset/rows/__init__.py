"""Tables and their rows: readers of CSV, JSON Lines, Parquet; columns, records, errors of one row."""
