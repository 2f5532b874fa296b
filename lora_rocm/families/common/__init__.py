"""Code that families share: base classes, encoders, tokenizers, recomputation, UNets and transformers."""
