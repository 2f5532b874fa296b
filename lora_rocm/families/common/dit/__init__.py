"""Code that families with a diffusion transformer share: flow matching, text of any length, previews."""
