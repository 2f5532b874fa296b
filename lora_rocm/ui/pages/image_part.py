"""The part Images, of all its modules."""

from __future__ import annotations

from lora_rocm.ui.pages import image_changes, image_checks, image_editor, image_losses, image_uploads, images, texts
from lora_rocm.ui.part import Part

PART = Part(
    "images",
    "/images",
    [
        *images.ROUTES,
        *image_changes.ROUTES,
        *image_checks.ROUTES,
        *image_editor.ROUTES,
        *image_losses.ROUTES,
        *image_uploads.ROUTES,
        *texts.ROUTES,
    ],
)
