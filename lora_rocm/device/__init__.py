"""The one door between host and device, and what guards it."""
