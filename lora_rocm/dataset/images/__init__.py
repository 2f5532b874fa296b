"""Images: reading their formats, aspect-ratio buckets, crops, and other variations."""
