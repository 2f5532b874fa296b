"""Where frozen weights live: one protocol, and a class per answer."""
