"""Jobs and answers of the child process that downloads models from the hub. The table is ``jobs.CHILDREN``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OfferJob:
    """Job to ask the hub what a download of a model would fetch. repo: its hub id."""

    repo: str


@dataclass(frozen=True)
class OfferedFile:
    """A file of a repository. name: its path there. is_here: whether it is in the cache already."""

    name: str
    num_bytes: int
    is_here: bool


@dataclass(frozen=True)
class HubOffer:
    """A model of the hub that can be downloaded.

    Attributes:
        repo: its hub id.
        commit: the revision of its default branch.
        patterns: patterns of the files that training reads.
        files: these files.
        licence: name of its licence; empty if its page names none.
        licence_address: address of the licence's text; empty if unknown.
        page: address of its page.
        has_terms: whether it can only be downloaded after its terms were accepted on its page.
        may_download: whether it has no terms, or this machine's user has accepted them.
        has_token: whether this machine has a token of the hub.
    """

    repo: str
    commit: str
    patterns: tuple[str, ...]
    files: tuple[OfferedFile, ...]
    licence: str
    licence_address: str
    page: str
    has_terms: bool
    may_download: bool
    has_token: bool

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Size of the files that are not in the cache."""
        return sum(file.num_bytes for file in self.files if not file.is_here)


@dataclass(frozen=True)
class FetchJob:
    """Job to download files of a model of the hub into its cache. patterns: patterns of their names."""

    repo: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Fetched:
    """Answer: the folder of the downloaded files in the cache."""

    folder: str
