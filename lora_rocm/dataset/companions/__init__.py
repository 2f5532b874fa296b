"""Files that belong to an image: masks, control images, and how they are paired with it."""
