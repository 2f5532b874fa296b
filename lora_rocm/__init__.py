"""lora-rocm: a LoRA trainer that people with AMD GPUs can trust."""

__version__ = "0.1.0"
