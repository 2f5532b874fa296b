"""The SDXL family. Its module ``spec`` can be imported without torch."""
