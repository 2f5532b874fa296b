"""Rules that follow from the recipe's ``runtime.attention`` and from choices that were measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rocm import __version__
from lora_rocm.foundation.packages import versions_of
from lora_rocm.foundation.tables import by_name, read_rows
from lora_rocm.hardware.selftest_result import SoftwareAndGpu
from lora_rocm.hardware.tuned_choice import Kind, Tuned, path_of, stored, table_of
from lora_rocm.rules.rule import MachineRule, Situation

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

PACKAGES = ("diffusers", "transformers", "peft", "triton", "flash-attn", "aiter", "amd-aiter")
"""Packages that compute attention or determine shapes. A measured choice is valid only for their versions."""
NAMED = ("sdpa", "flash", "aiter")
"""Values of runtime.attention that must pass a trial on the GPU before they are used."""


def key_of(kind: Kind, stack: SoftwareAndGpu, recipe: Recipe) -> dict[str, Any]:
    """Return the conditions under which a choice is valid.

    They are GPU, driver, software versions, and the recipe values that determine the shapes.
    """
    versions = {"lora-rocm": __version__, **versions_of(PACKAGES)}
    shapes = {
        "model": recipe.model.model_dump(mode="json"),
        "resolutions": sorted({source.resolution for source in recipe.data.resolved_sources()}),
        "buckets": recipe.data.model_dump(include={"bucket_step", "bucket_max_aspect", "enable_bucket"}),
        "controls": recipe.data.has_controls,
        "batch_size": recipe.train.batch_size,
        "graphs": recipe.runtime.graphs,
        "mixed_precision": recipe.train.mixed_precision,
        "lora": recipe.lora.model_dump(mode="json", exclude={"alpha", "init_from"}),
    }
    if recipe.data.most_frames > 1:
        shapes["frames"] = recipe.data.most_frames
    if kind == "attention":
        shapes["asked"] = recipe.runtime.attention
    stacked = {"torch": stack.torch, "runtime": stack.runtime, "driver": stack.driver, "gpu": stack.gpu}
    return {"stack": stacked, "versions": versions, "shapes": shapes}


def wants(kind: Kind, recipe: Recipe) -> bool:
    """Whether a run of this recipe on a GPU uses a measured choice of this kind."""
    runtime = recipe.runtime
    if runtime.deterministic or runtime.device == "cpu":
        return False
    if kind == "products":
        return runtime.profile == "fast"
    named = runtime.attention in NAMED or (runtime.attention == "auto" and runtime.profile == "fast")
    return named and runtime.compile in ("auto", "off")


def kept_choices(folder: Path, stack: SoftwareAndGpu | None, recipe: Recipe | None) -> Tuned:
    """Return the stored choices that a run of this recipe would use on this machine."""
    if stack is None or recipe is None:
        return Tuned()
    attention, products = (
        stored(folder, kind, key_of(kind, stack, recipe)) if wants(kind, recipe) else None
        for kind in ("attention", "products")
    )
    products = products if products and products.chosen else None
    table = "" if products is None else str(table_of(path_of(folder, "products", products.key)))
    return Tuned(attention, products, table)


def _attention(situation: Situation) -> str | None:
    recipe, found = situation.recipe, situation.tuned.attention
    if recipe is not None and recipe.runtime.attention == "math":
        return json.dumps("math")
    return None if found is None else json.dumps("auto" if found.chosen == "sdpa" else found.chosen)


def _times(situation: Situation) -> str:
    found = situation.tuned.attention
    return "" if found is None else f": {described(found.rows)}"


def described(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of an attention trial as text."""
    texts = [
        f"{row['way']} {row['seconds'] * 1e3:.3g} ms"
        if row.get("problem") is None
        else f"{row['way']}: {row['problem']}"
        for row in rows
    ]
    return "; ".join(texts)


def attention_text(situation: Situation) -> str:
    """Return a text about the attention backend used in training."""
    recipe, found = situation.recipe, situation.tuned.attention
    if found is not None:
        return f"{found.chosen} (measured: {described(found.rows)})"
    if recipe is not None and recipe.runtime.attention == "math":
        return "math"
    if recipe is not None and wants("attention", recipe):
        return "measured on the GPU before the run"
    return "sdpa, which is torch's choice"


def _table(situation: Situation) -> str | None:
    """Return the path of the table of tuned products as JSON, or None if there is no table or hipBLASLt was turned off.

    Without hipBLASLt the table is not used, because it may name hipBLASLt's solutions.
    """
    off = "hipblaslt-off" in situation.changes or not situation.tuned.table
    return None if off else json.dumps(situation.tuned.table)


def _no_hipblaslt(situation: Situation) -> str | None:
    """Return "0", which turns hipBLASLt off, if the table was tuned without hipBLASLt; else None.

    Torch rejects such a table if hipBLASLt is allowed.
    """
    found = situation.tuned.products
    return "0" if found is not None and _table(situation) and "HIPBLASLT_VERSION" not in found.chosen else None


FUNCTIONS = by_name(_attention, _table, _no_hipblaslt, _times)


@cache
def tuned_rules() -> tuple[MachineRule, ...]:
    """Return the rules about measured choices. Errors are as in ``read_rows``."""
    return read_rows(Path(__file__).with_name("tuned_rules.toml"), MachineRule, FUNCTIONS)
