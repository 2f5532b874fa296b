"""Adapter files of all trainers: reading them, the names in them, and starting from them."""
