"""Pictures and captions, buckets, caches, batches."""
