"""Downloads models from the Hugging Face Hub. Cached models need no network.

If the hub is unreachable, the user gets an error message instead of a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path, PurePosixPath

from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is from the HTTP library that it uses
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lora_rocm.errors import ModelError, StorageError, storage_error
from lora_rocm.model_files.header import PICKLE_SUFFIXES
from lora_rocm.model_files.models import INDEXES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ANSWER_TIMEOUT_S = 15.0  # snapshot_download waits for a silent hub without limit (huggingface_hub 2.4)
WEIGHTS_OF_TEXT = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
"""Patterns of the weight files of a language model."""
TOKENIZER_OF_TEXT = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
LANGUAGE_MODEL = ("config.json", "generation_config.json", *WEIGHTS_OF_TEXT, *TOKENIZER_OF_TEXT)
"""Patterns of all files of a language model that training reads."""
EXTRAS = ("safety_checker", "feature_extractor", "image_encoder")
"""Folders of diffusers models that training does not read."""
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

    half, full = (_of_parts(parts, tokenizers, suffix) for suffix in (".fp16", ""))
    folder = download(repo, revision, half, has_weights) or download(repo, revision, full, has_weights)
    if folder is None:
        what = "Some components of this model are not on this machine as safetensors weights."
        fix = "Connect to the network to finish the download, or choose a model that has safetensors weights."
        raise _error("hub-incomplete", what, repo, fix)
    return folder


def _of_parts(parts: Sequence[str], tokenizers: Sequence[str], suffix: str) -> list[str]:
    """Return the patterns of the files of a diffusers model. suffix: ".fp16" for half-precision weights, else empty."""
    configs = [*INDEXES, "scheduler/*.json", *(f"{part}/*.json" for part in parts)]
    configs += [f"{tokenizer}/*" for tokenizer in tokenizers]
    return [*configs, *(f"{part}/*{suffix}.safetensors" for part in parts)]


def wanted_patterns(names: Collection[str]) -> list[str]:
    """Return the patterns of the files that training reads, from the names of a repository's files.

    They are what ``download_model`` and language models ask for. Empty if it has no model that can be trained.
    """
    paths = [PurePosixPath(name) for name in names]
    folders = {str(path.parent) for path in paths if len(path.parts) == 2} - {*EXTRAS}
    weights = [path for path in paths if len(path.parts) == 2 and path.suffix == ".safetensors"]
    if any(name in names for name in INDEXES):
        parts = sorted({str(path.parent) for path in weights} & folders)
        tokenizers = sorted(folder for folder in folders if folder.startswith("tokenizer"))
        halves = {str(path.parent) for path in weights if path.name.endswith(".fp16.safetensors")}
        return _of_parts(parts, tokenizers, ".fp16" if parts and halves >= {*parts} else "") if parts else []
    has_weights = any(path.match(pattern) for path in paths for pattern in WEIGHTS_OF_TEXT if len(path.parts) == 1)
    return [*LANGUAGE_MODEL] if "config.json" in names and has_weights else []


def fetch(repo: str, patterns: Sequence[str]) -> Path:
    """Download the files of a repository's default branch that match the patterns, into the cache of the hub.

    Complete files of an earlier download are kept.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated.
        StorageError: the disk is full, or the cache cannot be written.
    """
    again = "Start it again: the files that are complete are kept."
    with answered(repo, _error("hub-unreachable", "The hub stopped answering.", repo, again)):
        return Path(snapshot_download(repo, allow_patterns=list(patterns)))


@contextmanager
def answered(repo: str, unreachable: ModelError) -> Iterator[None]:
    """Turn the errors of the hub and the network into errors with a fix.

    Args:
        repo: hub id of the model.
        unreachable: the error for a hub that cannot be reached.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-gated.
        StorageError: the disk is full.
    """
    try:
        yield
    except GatedRepoError as error:
        terms = f"Accept its terms at https://huggingface.co/{repo}, then log in: hf auth login, or set HF_TOKEN."
        needed = "This model requires that you accept its terms on its hub page."
        raise _error("hub-gated", needed, repo, terms) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        unknown = "The hub has no such model or revision, or it is private."
        hint = "Check the spelling of the hub id. For a private model, log in: hf auth login, or set HF_TOKEN."
        raise _error("hub-unknown", unknown, repo, hint) from error
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            raise full(error) from error
        raise unreachable from error


def full(error: OSError) -> StorageError:
    """Return the error for a full disk."""
    from huggingface_hub import constants

    return storage_error(error, constants.HF_HUB_CACHE)


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
        StorageError: the disk is full.
    """
    cached: Path | None = None
    try:
        cached = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
        if complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    what = "The model is neither a local folder nor cached, and the hub cannot be reached."
    fix = "Connect to the network once, or download the model elsewhere and set model.name_or_path to it."
    try:
        with answered(repo, _error("hub-unreachable", what, repo, fix)):
            model_info(repo, revision=revision, timeout=ANSWER_TIMEOUT_S)
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except ModelError as error:
        if error.code == "hub-unreachable" and cached is not None:
            return None
        raise
    return folder if complete(folder) else None


def _error(code: str, what: str, repo: str, fix: str) -> ModelError:
    return ModelError(code, what, where=f"model.name_or_path: {repo}", fix=fix)
