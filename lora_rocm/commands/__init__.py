"""One module per command of ``lora-rocm``. Only these modules print."""
