"""Files, size and terms of a base model on the Hugging Face hub, before it is downloaded."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCardData, constants, get_hf_file_metadata, get_token, hf_hub_url, model_info

from lora_rocm.base_models.hub import ANSWER_TIMEOUT_S, HUB_ID, answered, wanted_patterns
from lora_rocm.errors import ModelError
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.model_files.hub_cache import snapshot_of
from lora_rocm.processes.hub_jobs import HubOffer, OfferedFile

MAX_REPO_LETTERS, MAX_SHOWN = 200, 200


def offer(repo: str) -> HubOffer:
    """Ask the hub what a model consists of. Nothing is downloaded.

    Raises:
        ModelError: hub-unreachable, hub-unknown, hub-no-model: it has no files that training reads.
    """
    if HUB_ID.fullmatch(repo) is None or len(repo) > MAX_REPO_LETTERS:
        fix = "Write it as on its page: OWNER/NAME."
        raise ModelError("hub-unknown", "This is not a hub id.", where=f"model.name_or_path: {repo!a:.100}", fix=fix)
    with answered(repo, _unreachable(repo)):
        info = model_info(repo, timeout=ANSWER_TIMEOUT_S, files_metadata=True)
    # Choose the files
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    patterns = wanted_patterns(sizes)
    if not patterns:
        raise ModelError(
            "hub-no-model",
            "This repository has neither a diffusers model nor a language model with .safetensors weights.",
            where=f"model.name_or_path: {repo}",
            fix="Download the file that you need from its page, and set model.name_or_path to its path.",
        )
    names = [name for name in sizes if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    here = snapshot_of(repo, str(info.sha), Path(constants.HF_HUB_CACHE))
    files = [OfferedFile(name, sizes[name], (here / name).is_file()) for name in sorted(names)]
    # Terms
    licence, address = _licence(info.card_data)
    has_terms = bool(info.gated)
    may_download = not has_terms or _is_granted(repo, names)
    page = f"{constants.ENDPOINT}/{repo}"
    return HubOffer(
        repo,
        str(info.sha),
        tuple(patterns),
        tuple(files),
        licence,
        address,
        page,
        has_terms,
        may_download,
        bool(get_token()),
    )


def _unreachable(repo: str) -> ModelError:
    fix = "Check the network, and HF_HUB_OFFLINE and HF_ENDPOINT if they are set."
    return ModelError("hub-unreachable", "The hub cannot be reached.", where=f"model.name_or_path: {repo}", fix=fix)


def _is_granted(repo: str, names: Sequence[str]) -> bool:
    """Whether the hub sends a file of a model with terms to this user."""
    smallest = next((name for name in names if name.endswith(".json")), names[0])
    try:
        with answered(repo, _unreachable(repo)):
            get_hf_file_metadata(hf_hub_url(repo, smallest), timeout=ANSWER_TIMEOUT_S)
    except ModelError as error:
        if error.code == "hub-gated":
            return False
        raise
    return True


def _licence(card: ModelCardData | None) -> tuple[str, str]:
    """Return name and address of the licence that a model card names."""
    values: Mapping[str, object] = {} if card is None else vars(card)
    name, address = values.get("license_name") or values.get("license"), values.get("license_link")
    address = address if isinstance(address, str) and address.startswith("https://") else ""
    return (one_line(name)[:MAX_SHOWN] if isinstance(name, str) else ""), one_line(address)[:MAX_SHOWN]
