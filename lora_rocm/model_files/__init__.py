"""Identifies a model file by its header: family, component, storage format, kind of adapter. Imports no torch."""
