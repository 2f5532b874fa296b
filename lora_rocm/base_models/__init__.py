"""Base models: file formats, tensor names, the hub, loading."""
