"""Base models as files: formats, names of tensors, the hub, loading."""
