"""Model families: one package per family, and code that they share."""
