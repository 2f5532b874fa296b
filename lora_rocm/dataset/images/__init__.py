"""Images: formats and their optional readers, buckets, crops and other views."""
