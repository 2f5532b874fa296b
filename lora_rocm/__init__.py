"""lora-rocm: a LoRA trainer that people with AMD GPUs can trust."""

import time

__version__ = "0.2.0"
BEGAN_S = time.time()
"""The first instruction of this program in this process, in seconds since the epoch."""
