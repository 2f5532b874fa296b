"""Downloads models from the Hugging Face Hub. Cached models need no network.

If the hub is unreachable, the user gets an error message instead of a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is from the HTTP library that it uses
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lora_rocm.errors import ModelError
from lora_rocm.model_files.header import PICKLE_SUFFIXES
from lora_rocm.model_files.models import INDEXES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ANSWER_TIMEOUT_S = 15.0  # snapshot_download waits for a silent hub without limit (huggingface_hub 2.4)
FILE_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES, ".yaml", ".json")


def resembles_id(name: str) -> bool:
    """Return whether a name looks like a hub id (``owner/model``).

    The caller has checked that it is not an existing path.
    """
    return HUB_ID.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES)


def download_model(repo: str, revision: str | None, parts: Sequence[str], tokenizers: Sequence[str]) -> Path:
    """Return the snapshot folder of a diffusers model, with its configs, tokenizers and safetensors weights.

    Half-precision weights are preferred.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated, hub-incomplete.
    """

    def has_weights(folder: Path) -> bool:
        return all(any((folder / part).glob("*.safetensors")) for part in parts)

    configs = [*INDEXES, "scheduler/*.json", *(f"{part}/*.json" for part in parts)]
    configs += [f"{tokenizer}/*" for tokenizer in tokenizers]
    half = [*configs, *(f"{part}/*.fp16.safetensors" for part in parts)]
    full = [*configs, *(f"{part}/*.safetensors" for part in parts)]
    folder = download(repo, revision, half, has_weights) or download(repo, revision, full, has_weights)
    if folder is None:
        what = "Some components of this model are not on this machine as safetensors weights."
        fix = "Connect to the network to finish the download, or choose a model that has safetensors weights."
        raise _error("hub-incomplete", what, repo, fix)
    return folder


def download(repo: str, revision: str | None, patterns: list[str], complete: Callable[[Path], bool]) -> Path | None:
    """Return the snapshot folder with the files that match ``patterns``.

    The network is used unless the cache is complete.

    Returns None if files are still missing, because the repository lacks them or the network failed.

    Args:
        repo: hub id of the model.
        revision: branch, tag or commit; None for the default branch.
        patterns: patterns of file names.
        complete: returns whether a snapshot folder has all needed files.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated.
    """
    cached: Path | None = None
    try:
        cached = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
        if complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        model_info(repo, revision=revision, timeout=ANSWER_TIMEOUT_S)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        fix = f"Accept its terms at https://huggingface.co/{repo}, then log in: hf auth login, or set HF_TOKEN."
        raise _error(
            "hub-gated", "This model requires that you accept its terms on its hub page.", repo, fix
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        fix = "Check the spelling of the hub id and the revision."
        raise _error("hub-unknown", "The hub has no such model or revision.", repo, fix) from error
    except (OSError, HTTPError) as error:
        if cached is not None:
            return None
        what = "The model is neither a local folder nor cached, and the hub cannot be reached."
        fix = "Connect to the network once, or download the model elsewhere and set model.name_or_path to it."
        raise _error("hub-unreachable", what, repo, fix) from error
    return folder if complete(folder) else None


def _error(code: str, what: str, repo: str, fix: str) -> ModelError:
    return ModelError(code, what, where=f"model.name_or_path: {repo}", fix=fix)
