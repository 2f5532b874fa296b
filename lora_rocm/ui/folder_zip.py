"""A result folder of a run as one ZIP file: stored, not compressed, and sent piece by piece without a copy on disk."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from starlette.responses import StreamingResponse

from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.ui.run_files import MAX_FILES, ResultFolder

PIECE_BYTES = 1 << 20
NOT_PORTABLE = re.compile(r'[\\:*?"<>|\x00-\x1f]|[. ]$')
"""Matches the name of a file that a program may unpack elsewhere, or that Windows cannot have."""


class _Sent:
    """Receives what ``ZipFile`` writes. It cannot seek, so sizes and checksums follow each file."""

    def __init__(self) -> None:
        self.pieces = list[bytes]()

    def write(self, data: bytes) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        found, self.pieces = b"".join(self.pieces), []
        return found


def zip_answer(run_dir: RunDir, folder: ResultFolder) -> StreamingResponse:
    """Return the answer that saves a folder as a ZIP file. Unpacked, it is one folder with the name of the ZIP file.

    Raises:
        UserError: folder-not-zipped: it has more files than the page lists, or a name that is not portable.
    """
    names = {path.relative_to(folder.path).as_posix(): path for path in folder.files}
    odd = [name for name in names if any(NOT_PORTABLE.search(part) for part in name.split("/"))]
    if odd or not _is_whole(folder):
        what = f"A file's name is not portable: {odd[0]!a:.100}." if odd else "It has more files than the page lists."
        fix = "Copy the folder itself."
        where = str(folder.path)
        raise UserError("folder-not-zipped", f"This folder cannot be one ZIP file. {what}", where=where, fix=fix)
    top = zip_name(run_dir, folder.path)
    name = quote(f"{top}.zip")
    headers = {"content-disposition": f"attachment; filename=\"{name}\"; filename*=utf-8''{name}"}
    inside = {f"{top}/{name}": path for name, path in sorted(names.items())}
    return StreamingResponse(_pieces(inside), media_type="application/zip", headers=headers)


def zip_name(run_dir: RunDir, folder: Path) -> str:
    """Return the name of a folder's ZIP file without its suffix: the run, the step of an earlier export, the format.

    Letters that a program could take for a path are replaced.
    """
    parts = [run_dir.path.name, *folder.relative_to(run_dir.path).parts[-2:]]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip(".-")


def _is_whole(folder: ResultFolder) -> bool:
    """Whether a folder has only files that the page lists: no hidden ones, no links that leave the run, none deeper."""
    found = [path for depth in ("*", "*/*", "*/*/*") for path in islice(folder.path.glob(depth), MAX_FILES)]
    return 0 < len(folder.files) < MAX_FILES and len(folder.files) == sum(not path.is_dir() for path in found)


def _pieces(files: dict[str, Path]) -> Iterator[bytes]:
    """Yield a ZIP file. files: the file of each name in it."""
    sent = _Sent()
    with zipfile.ZipFile(sent, "w", zipfile.ZIP_STORED) as archive:
        for name, path in files.items():
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            # writes: pieces for the browser; there is no file
            with path.open("rb") as file, archive.open(entry, "w", force_zip64=True) as into:
                while piece := file.read(PIECE_BYTES):
                    into.write(piece)
                    yield sent.taken()
    yield sent.taken()
