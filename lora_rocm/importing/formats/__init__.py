"""Readers for the file formats of other trainers' configurations. They return settings with line numbers."""
