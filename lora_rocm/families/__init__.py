"""Model families: one package each, and their shared code."""
