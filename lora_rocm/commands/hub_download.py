"""Downloads a base model from the hub in a child process, with progress, and stops it if the user cancels."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lora_rocm.errors import StorageError
from lora_rocm.foundation.units import size_text
from lora_rocm.model_files.hub_cache import snapshot_of
from lora_rocm.processes.hub_jobs import FetchJob, HubOffer, OfferJob
from lora_rocm.processes.tool import ask, run_job

READING_S = 0.5
"""Time between two readings of the sizes of the files."""
INCOMPLETE, SPARE_BYTES = ".incomplete", 1 << 28
Advance = Callable[[int, int], None]
"""Receives the bytes on the disk, and all bytes. If it raises an error, the download ends."""


def offered(repo: str) -> HubOffer:
    """Ask the hub what a model consists of, in a child process. Nothing is downloaded.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-no-model.
    """
    return ask(OfferJob(repo.strip()), HubOffer, os.environ)


def download_base(offer: HubOffer, advance: Advance) -> Path:
    """Download the files of an offer, and return their folder. Complete files of an earlier download are kept.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated.
        StorageError: disk-full: before it begins, if the disk has no room for it; or the cache cannot be written.
        StoppedError: what ``advance`` raises.
    """
    folder = snapshot_of(offer.repo, offer.commit)
    require_space(folder, offer.missing_bytes)
    blobs = folder.parents[1] / "blobs"
    before, next_s = set(_incomplete(blobs)), [0.0]

    def report_progress() -> None:
        if time.monotonic() >= next_s[0]:
            next_s[0] = time.monotonic() + READING_S
            advance(_present(offer, folder, blobs, before), offer.num_bytes)

    try:
        run_job(FetchJob(offer.repo, offer.patterns), os.environ, lambda event: None, report_progress)
    finally:
        for path in set(_incomplete(blobs)) - before:  # of this download, which nothing continues
            with contextlib.suppress(OSError):
                path.unlink()  # writes: its own incomplete files in the hub's cache
    advance(offer.num_bytes, offer.num_bytes)
    return folder


def require_space(folder: Path, num_bytes: int) -> None:
    """Check that the disk has room for a download.

    Raises:
        StorageError: disk-full.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(there).free
    if num_bytes and free_bytes < num_bytes + SPARE_BYTES:
        what = f"The download needs {size_text(num_bytes)}, and {size_text(free_bytes)} are free on this disk."
        fix = "Free some space, or set HF_HOME to a folder on another disk and start lora-rocm again."
        raise StorageError("disk-full", what, where=str(there), fix=fix)


def _present(offer: HubOffer, folder: Path, blobs: Path, before: set[Path]) -> int:
    """Return the bytes of the offer's files that are on the disk."""
    num_bytes = sum(file.num_bytes for file in offer.files if (folder / file.name).exists())
    for path in set(_incomplete(blobs)) - before:
        with contextlib.suppress(OSError):
            num_bytes += path.stat().st_size
    return min(num_bytes, offer.num_bytes)


def _incomplete(blobs: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in blobs.iterdir() if path.name.endswith(INCOMPLETE)]
    return []
