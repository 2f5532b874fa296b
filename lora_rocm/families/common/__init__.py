"""What families share: base classes, encoders, tokenizers, recompute, what UNets and what transformers share."""
