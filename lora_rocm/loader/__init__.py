"""Loads batches from the cache: DataLoader workers, prefetch, repair of entries."""
