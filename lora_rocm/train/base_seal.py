"""Digests of the frozen base model, to compare it with the base that a checkpoint was trained with.

They are computed from the fingerprints of the transfer to the device. So they cost nothing extra, and cover the bytes
used in training. A file's size, times and stored digest can be unchanged although its bytes have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from lora_rocm.adapters.training_adapter import NAME
from lora_rocm.device.placement.base import Sent
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import EncodesWithComponents, ModelFamily
from lora_rocm.train.checkpoint import Checkpoint

Seals = dict[str, str]
"""Component and dtype ("unet bfloat16"), mapped to a digest of the fingerprints of its tensors.

The training adapter counts as a separate component.

The dtype is part of the key because a run may switch to another dtype after a failure. Its tensors then have different
bytes, although they belong to the same base.
"""


def seals_of(sent: Mapping[str, Sent]) -> Seals:
    """Seals of frozen tensors.

    ``sent``: their fingerprints by name. A layer wrapped by an adapter is named as in the base.
    """
    lines: dict[str, list[str]] = {}
    for name, tensor in sent.items():
        component = NAME if f".{NAME}." in name else name.partition(".")[0]
        key = f"{component} {tensor.dtype}".replace("torch.", "")
        lines.setdefault(key, []).append(f"{name.replace('.base_layer.', '.')} {tensor.fingerprint}")
    return {key: hashlib.sha256("\n".join(sorted(found)).encode("utf-8")).hexdigest() for key, found in lines.items()}


def identities(family: ModelFamily, encoders: bool = True) -> dict[str, str]:
    """Identities of a base as stored in checkpoints: the trained components ("base") and other components, if any.

    ``encoders``: whether the other components are included. Their files are read if they are not loaded.
    """
    found = {"base": family.base_facts()["identity"]}
    if encoders and isinstance(family, EncodesWithComponents):
        found["encoders"] = family.encoders_identity
    return found


def require_trained_base(
    checkpoint: Checkpoint | None,
    name: str,
    family: ModelFamily,
    notify: Callable[[str], None],
    *,
    refuse: bool = True,
    encoders: bool = True,
) -> None:
    """Compare a base with the base of a run, as recorded in the run's checkpoint.

    Call it once the base is loaded: the digests of the trained components are then known, so comparing them is free.

    Args:
        checkpoint: the run's checkpoint, or None if it has none.
        name: the base's name in the recipe.
        family: the base's family, with the trained components of the run.
        notify: receives notices.
        refuse: whether to raise an error if the base differs; otherwise a notice is sent.
        encoders: whether to compare the components that are not trained, too.

    Raises:
        AdapterError: "export-other-base", the base differs.
    """
    if checkpoint is None:
        notify("The base was not compared with the run's base, because no checkpoint records it.")
        return
    facts, now = checkpoint.facts, identities(family, encoders)
    differing = [key for key in now if key in facts and facts[key] != now[key]]  # earlier checkpoints have no encoders
    if not differing:
        return
    if "base_seals" not in facts:
        notify("The base was not compared with the run's base, which an earlier version recorded differently.")
        return
    what = "The base model's files" if "base" in differing else "The files of the base model's text encoders or VAE"
    if not refuse:
        notify(f"{what} differ from the files used to train this adapter.")
        return
    raise AdapterError(
        "export-other-base",
        f"{what} differ from the files used to train this adapter.",
        where=f"model.name_or_path: {name}",
        fix="Restore those files, or set model.revision to the revision used for training.",
    )


def broken(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Sorted keys that have different digests in the two mappings. A key in only one of them is ignored."""
    return sorted(key for key in before.keys() & now.keys() if before[key] != now[key])
