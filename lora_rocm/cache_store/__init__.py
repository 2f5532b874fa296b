"""Cache entries as files, without torch: header, checksums and maintenance."""
