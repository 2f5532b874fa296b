"""Reads the images and captions of a folder as training does, and changes them. Nothing here knows the browser.

A property of the files needs three places: ``choosing.SORTS`` and ``ONLY`` for the grid, and ``item.ShownImage`` for
the editor. ``folder_losses`` has the losses of images in a run, which the grid and the editor ask for separately.
"""
