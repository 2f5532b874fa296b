"""Tables of rows and what one row says: readers of CSV, JSON Lines, Parquet; columns, records, errors of one row."""
