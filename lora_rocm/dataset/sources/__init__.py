"""What a recipe's sources hold: walks over folders and tables, kinds of files, metadata next to images."""
