"""Writes LoRA files in all formats, and verifies them with the libraries that will read them.

Each family defines the names of the keys (``families.lora_file_names``).
"""
