"""Language models that predict the next token, with any architecture supported by transformers."""
