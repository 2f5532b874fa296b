"""Language models that write the next token, of any architecture that transformers knows."""
