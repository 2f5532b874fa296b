"""Rules that set a machine's variables and settings, mitigations after failures, and the mitigations' store."""
