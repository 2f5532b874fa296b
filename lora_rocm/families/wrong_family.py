"""The error for a base that belongs to another family than the recipe's."""

from __future__ import annotations

from collections.abc import Sequence

from lora_rocm.base_models.loading import Source
from lora_rocm.errors import ModelError
from lora_rocm.families.registry import PRODUCT


def wrong_family(source: Source, what: str, wanted: str, families: Sequence[str], fix: str) -> ModelError:
    """The error "wrong-family".

    Args:
        source: the base.
        what: what it is, with its article.
        wanted: title of the recipe's family.
        families: values of ``model.family`` that it may belong to.
        fix: advice for a base of another kind.
    """
    names = " or ".join(f"model.family: {name}" for name in families if name in PRODUCT)
    return ModelError(
        "wrong-family",
        f"This is {what}, and {wanted} is wanted.",
        where=f"model.name_or_path: {source.name}",
        fix=f"To train on it, set {names}. Else: {fix[0].lower()}{fix[1:]}" if names else fix,
    )
