"""What is trained on, without torch: folders and datasets, captions, buckets, the order of batches."""
