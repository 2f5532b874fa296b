"""The images and captions of a folder, as training reads them, and changes of them. Nothing here knows the browser."""
