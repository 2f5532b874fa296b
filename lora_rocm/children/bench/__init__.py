"""Child processes of ``lora-rocm bench``, which import torch."""
