"""Writes LoRA files in each format, and verifies them with the readers of their users."""
