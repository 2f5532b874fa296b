"""Encodes images and captions into the cache, and reads them back verified."""
