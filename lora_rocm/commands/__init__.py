"""One file a command of ``lora-rocm``; only these print."""
