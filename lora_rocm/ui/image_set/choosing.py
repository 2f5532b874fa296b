"""Chooses and orders the images that the grid shows."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.dataset.captions.captions import tags_of
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.ui.image_set.folder_losses import FolderLosses
from lora_rocm.ui.image_set.item import geometry
from lora_rocm.ui.image_set.listing import ImageListing

CAPTION_LETTERS = 160
"""Letters of a caption in a tile."""
MAX_ROWS, MAX_KEPT = 500, 8
BUCKET = "bucket:"
NEVER_LEARNED, BY_LOSS = "never", "loss"
"""Values of ``ImageQuery.only`` and ``ImageQuery.sort`` that need the losses of a run."""
ONLY: Mapping[str, Callable[[ImageListing, str], bool]] = {
    "without": lambda listing, name: not listing.caption(name).text.strip(),
    "with": lambda listing, name: bool(listing.caption(name).text.strip()),
    "masked": lambda listing, name: listing.mask(name) is not None,
    "cropped": lambda listing, name: listing.crop(name) is not None,
    "unread": lambda listing, name: bool(listing.caption(name).problem) or listing.size(name) is None,
}
"""The values of ``ImageQuery.only`` that choose images."""
SORTS: Mapping[str, Callable[[ImageListing, str], int]] = {
    "short": lambda listing, name: len(listing.caption(name).text),
    "long": lambda listing, name: -len(listing.caption(name).text),
    "large": lambda listing, name: -_area(listing, name),
    "small": lambda listing, name: _area(listing, name),
}
"""The values of ``ImageQuery.sort`` that need no losses. The default is the order of names."""


@dataclass(frozen=True)
class ImageQuery:
    """The images that are shown.

    Attributes:
        text: a text that the caption or the name contains; case does not matter.
        tag: a tag that the caption has.
        only: a key of ONLY, BUCKET with a size such as 1024x768, or empty.
        sort: a key of SORTS, or empty for the order of names.
        names: if given, only these images.
        losses: the losses for NEVER_LEARNED and BY_LOSS; without them, the first has no images.
    """

    text: str = ""
    tag: str = ""
    only: str = ""
    sort: str = ""
    names: tuple[str, ...] = ()
    losses: FolderLosses | None = None

    @property
    def needs_losses(self) -> bool:
        return self.only == NEVER_LEARNED or self.sort == BY_LOSS

    @property
    def lacks_losses(self) -> bool:
        """Whether it needs losses, and no run has recorded any."""
        return self.needs_losses and self.losses is None

    def chosen(self, listing: ImageListing) -> list[str]:
        """Return the names of the images, in order."""
        known = set(listing.names) if self.names else set()
        names: Sequence[str] = [name for name in self.names if name in known] if self.names else listing.names
        if self.text:
            wanted = self.text.casefold()
            names = [name for name in names if wanted in _searched(listing, name)]
        if self.tag:
            names = [name for name in names if _has_tag(listing, name, self.tag)]
        if (fits := ONLY.get(self.only)) is not None:
            names = [name for name in names if fits(listing, name)]
        elif self.only == NEVER_LEARNED:
            names = [name for name in names if self.losses is not None and self.losses.is_outlier(name)]
        elif self.only.startswith(BUCKET):
            names = [name for name in names if _bucket(listing, name) == self.only.removeprefix(BUCKET)]
        if (key := SORTS.get(self.sort)) is not None:
            names = sorted(names, key=lambda name: key(listing, name))
        elif self.sort == BY_LOSS and self.losses is not None:
            names = sorted(names, key=self.losses.place)
        return list(names)


def _searched(listing: ImageListing, name: str) -> str:
    return "\n".join((name, *listing.caption(name).texts)).casefold()


def _has_tag(listing: ImageListing, name: str, tag: str) -> bool:
    return any(tag in tags_of(text) for text in listing.caption(name).texts)


def _bucket(listing: ImageListing, name: str) -> str:
    size = listing.size(name)
    found = None if size is None else geometry(listing, name, size)
    return str(found.shape) if isinstance(found, Geometry) else ""


def _area(listing: ImageListing, name: str) -> int:
    width, height = listing.size(name) or (0, 0)
    return width * height


class ChosenImages:
    """The newest choices, by a token that the grid sends, so that scrolling neither chooses again nor changes order."""

    def __init__(self) -> None:
        self._kept = OrderedDict[str, tuple[ImageListing, list[str]]]()

    def rows(self, listing: ImageListing, query: ImageQuery, token: str, start: int, count: int) -> dict[str, object]:
        """Return a window of the chosen images, as the grid reads it.

        A row has the name, the begin of the caption, letters for its properties (m: mask, c: crop, n: no caption,
        p: problem), and the version of the file.
        """
        kept = self._kept.get(token)
        if kept is None or kept[0] is not listing:
            token, kept = secrets.token_hex(8), (listing, query.chosen(listing))
            self._kept[token] = kept
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        names = kept[1][max(0, start) : max(0, start) + min(max(0, count), MAX_ROWS)]
        return {"choice": token, "total": len(kept[1]), "start": start, "rows": [_row(listing, name) for name in names]}


def _row(listing: ImageListing, name: str) -> list[str]:
    caption = listing.caption(name)
    marks = {
        "m": listing.mask(name) is not None,
        "c": listing.crop(name) is not None,
        "n": not caption.text.strip() and not caption.problem,
        "p": bool(caption.problem),
    }
    letters = "".join(letter for letter, holds in marks.items() if holds)
    return [
        name,
        " ".join(caption.text[: 2 * CAPTION_LETTERS].split())[:CAPTION_LETTERS],
        letters,
        version_of(listing, name),
    ]


def version_of(listing: ImageListing, name: str) -> str:
    """Return a short text that differs after each change of the image's file."""
    try:
        found = FileVersion.of(listing.path(name))
    except OSError:
        return ""
    return f"{found.changed_ns:x}-{found.num_bytes:x}"


CHOSEN = ChosenImages()
"""The choices of this process."""
