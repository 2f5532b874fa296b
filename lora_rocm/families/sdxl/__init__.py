"""The SDXL family: ``spec`` is what the light half knows of it."""
