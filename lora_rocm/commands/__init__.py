"""The commands of ``lora-rocm``, one module each. Only these modules print."""
