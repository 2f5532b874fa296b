"""What a machine needs: environment variables, mitigations after failures, and their store."""
