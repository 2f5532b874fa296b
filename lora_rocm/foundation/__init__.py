"""Lowest layer of the package: files, bounded reads, terminal text, units, exit codes.

Imports only the standard library.
"""
