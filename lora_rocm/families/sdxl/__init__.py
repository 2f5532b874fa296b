"""The SDXL family; ``spec`` is its light half."""
