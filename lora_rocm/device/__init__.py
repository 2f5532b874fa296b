"""Data transfer between host and device, its checks, and the device's settings."""
