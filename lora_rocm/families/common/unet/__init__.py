"""Shared code of latent diffusion models with a UNet and CLIP: Stable Diffusion 1.x, 2.x and SDXL."""
