"""Batches from the cache: DataLoader workers, prefetch, repairs."""
