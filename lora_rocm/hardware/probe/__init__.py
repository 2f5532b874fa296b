"""Reads the facts of a machine on Linux, Windows and macOS. Standard library only."""
