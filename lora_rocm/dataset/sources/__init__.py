"""Contents of a recipe's sources: walks over folders and tables, kinds of files, metadata next to images."""
