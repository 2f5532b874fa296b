"""FLUX.1: dev, schnell and Kontext."""
