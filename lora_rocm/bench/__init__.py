"""The heavy children of ``lora-rocm bench``."""
