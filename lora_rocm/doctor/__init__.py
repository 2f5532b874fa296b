"""Finds problems of this machine and their remedies, ordered by severity."""
