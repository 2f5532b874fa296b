"""Where huggingface_hub keeps downloaded models, by the layout that its documentation describes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX, MAX_REPOSITORIES = "models--", 2000
DEFAULT_BRANCH = "main"


@dataclass(frozen=True)
class CachedRepository:
    """A repository in the cache.

    Attributes:
        name: its hub id.
        snapshot: the folder of the files of its default branch, or of its newest revision.
        is_default: whether it is the default branch, which a hub id without a revision means.
    """

    name: str
    snapshot: Path
    is_default: bool


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the cache."""
    if given := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(given)).expanduser()
    if given := environ.get("HF_HOME"):
        return Path(os.path.expandvars(given)).expanduser() / "hub"
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expandvars(cache)).expanduser() / "huggingface" / "hub"


def snapshot_of(repo: str, commit: str, cache: Path | None = None) -> Path:
    """Return the folder of a revision of a repository. It may not exist. cache: None for this user's."""
    return (cache or hub_cache()) / (PREFIX + repo.replace("/", "--")) / "snapshots" / commit


def cached_repositories(cache: Path) -> Iterator[CachedRepository]:
    """Yield the repositories of models that have files in the cache."""
    with contextlib.suppress(OSError):
        folders = [entry.name for entry in os.scandir(cache) if entry.name.startswith(PREFIX)]
        for name in sorted(folders)[:MAX_REPOSITORIES]:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (found := _cached(cache / name)) is not None:
                    yield found


def _cached(folder: Path) -> CachedRepository | None:
    name = folder.name.removeprefix(PREFIX).replace("--", "/")
    reference = folder / "refs" / DEFAULT_BRANCH
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8")[:80].strip()
        if commit.isalnum() and (folder / "snapshots" / commit).is_dir():
            return CachedRepository(name, folder / "snapshots" / commit, is_default=True)
    snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    newest = max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else CachedRepository(name, newest, is_default=False)
