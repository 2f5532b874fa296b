"""Finds and describes the training data: folders and datasets, captions, buckets, batch order. Needs no torch."""
