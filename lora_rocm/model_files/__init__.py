"""What a model file is, read from its header: family, component, storage format, kind of adapter. Light."""
