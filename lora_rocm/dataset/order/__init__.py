"""How often and in which order samples are trained on."""
