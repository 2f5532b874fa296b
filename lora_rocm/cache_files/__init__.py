"""Cache entries as files, without torch: their header and checksum, and their upkeep."""
