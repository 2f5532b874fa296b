"""Shared code of families with a diffusion transformer: flow matching, text of any length, previews."""
