"""Cache entries as files: header, checksums and maintenance. Needs no torch."""
