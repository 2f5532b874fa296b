"""Reads tables row by row: CSV, JSON Lines, Parquet. Recognises columns, builds records, and reports errors per row."""
