"""Reads the images and captions of a folder as training does, and changes them. Nothing here knows the browser."""
