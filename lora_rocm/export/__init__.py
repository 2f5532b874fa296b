"""Writes LoRA files in all formats, and verifies them with the libraries that will read them."""
