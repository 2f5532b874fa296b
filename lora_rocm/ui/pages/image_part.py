"""The part Images, of all its modules."""

from __future__ import annotations

from lora_rocm.ui.pages import image_changes, images
from lora_rocm.ui.part import Part

PART = Part("images", "/images", [*images.ROUTES, *image_changes.ROUTES])
