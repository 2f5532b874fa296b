"""Writes LoRA files in each format, and reads them back as their users do."""
