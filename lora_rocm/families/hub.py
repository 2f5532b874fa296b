"""Models from the hub: the local cache first, then the network; offline is a sentence, not a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lora_rocm.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FILE_SUFFIXES = (".safetensors", ".ckpt", ".bin", ".pt", ".pth", ".yaml", ".json")


def looks_like_id(name: str) -> bool:
    """Whether a name that is no path can be a hub id (``owner/model``)."""
    return HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES)


def download_model(repo: str, revision: str | None, parts: Sequence[str], tokenizers: Sequence[str]) -> Path:
    """The snapshot folder of a diffusers model: configs, tokenizers and safetensors weights, half precision preferred.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated.
    """

    def has_weights(folder: Path) -> bool:
        return all(any((folder / part).glob("*.safetensors")) for part in parts)

    configs = ["model_index.json", "scheduler/*.json", *(f"{part}/*.json" for part in parts)]
    configs += [f"{tokenizer}/*" for tokenizer in tokenizers]
    folder = download(repo, revision, [*configs, *(f"{part}/*.fp16.safetensors" for part in parts)], has_weights)
    if has_weights(folder):
        return folder
    return download(repo, revision, [*configs, *(f"{part}/*.safetensors" for part in parts)], has_weights)


def download(repo: str, revision: str | None, patterns: list[str], complete: Callable[[Path], bool]) -> Path:
    """The snapshot folder with the files of ``patterns``: from the cache if that is ``complete``, else by network."""
    try:
        cached = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
        if complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        fix = "Accept its terms there, then log in with the hub's own command."
        raise _error("hub-gated", "This model asks for your consent on its hub page.", repo, fix) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        fix = "Check the spelling of the hub id and the revision."
        raise _error("hub-unknown", "The hub has no such model or revision.", repo, fix) from error
    except (OSError, HTTPError) as error:
        what = "The model is neither a local folder nor cached, and the hub cannot be reached."
        fix = "Connect to the network once, or download the model elsewhere and give its folder."
        raise _error("hub-unreachable", what, repo, fix) from error


def _error(code: str, what: str, repo: str, fix: str) -> ModelError:
    return ModelError(code, what, where=repo, fix=fix)
