"""The bottom layer: files, bounded reads, terminal text, units, exit codes. Standard library only."""
