"""Data transfer between host and device, the checks of that data, and the device's settings."""
