"""Code that latent diffusion models with a UNet and CLIP share: Stable Diffusion 1.x, 2.x and SDXL."""
