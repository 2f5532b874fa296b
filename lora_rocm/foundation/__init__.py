"""What everything rests on: files, bounded reads, text for terminals, units, exit codes. Standard library only."""
