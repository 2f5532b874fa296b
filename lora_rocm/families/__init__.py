"""Model families: one package each, and the code that they share."""
