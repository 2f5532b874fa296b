"""Loads batches from the cache: worker processes, prefetch, and repair of damaged cache entries."""
