"""Rules for a machine: environment variables, mitigations after failures, and their store."""
