"""Finds problems of this machine, ordered by harm, and their remedies."""
