"""Shared code of families: base classes, encoders, tokenizers, recompute, and code for UNets and transformers."""
