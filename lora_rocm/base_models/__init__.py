"""Finds, checks and loads base models: file formats, tensor names, the Hugging Face Hub, tokenizers."""
