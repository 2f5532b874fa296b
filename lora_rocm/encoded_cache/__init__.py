"""Encodes images and captions into the cache, and reads verified entries back."""
