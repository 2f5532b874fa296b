"""Training data, without torch: folders and datasets, captions, buckets, batch order."""
