"""The parts of the page, one module each. ``lora_rocm.ui`` describes how a part is made."""
