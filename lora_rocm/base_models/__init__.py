"""Base models as files: formats, tensor names, the hub, loading."""
