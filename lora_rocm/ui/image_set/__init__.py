"""Reads the images and captions of a folder as training does, and changes them. Nothing here knows the browser.

A property of images from elsewhere, such as their losses in a run, needs three places: ``choosing.SORTS`` and ``ONLY``
for the grid, and ``item.ShownImage`` for the editor.
"""
