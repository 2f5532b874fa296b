"""Resolves ``lora.rank: auto`` to the rank and alpha of the file with which training starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_rocm.errors import ModelError, Problem
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.model_files.adapter_contents import IMPLAUSIBLE
from lora_rocm.model_files.adapter_sizes import alphas_of, ranks_of
from lora_rocm.model_files.header import read_header

AUTO = "auto"


def resolve_rank(data: dict[str, Any], where: Callable[[tuple[str, ...]], str]) -> list[Problem]:
    """Replace ``lora.rank: auto`` by the highest rank in the file of ``lora.init_from``.

    An unset ``lora.alpha`` becomes the highest alpha in the file.

    Args:
        data: recipe data before validation; changed in place.
        where: returns the file, line and name of a key.

    Returns:
        At most one problem, if the rank or alpha cannot be taken from the file.
    """
    lora = data.get("lora")
    if not isinstance(lora, dict) or lora.get("rank") != AUTO:
        return []
    place, file, given = where(("lora", "rank")), lora.get("init_from"), "Give lora.rank as a number."
    del lora["rank"]  # if there is a problem, it stays the only one
    if not isinstance(file, str):
        return [Problem(place, "auto takes the rank from the file of lora.init_from, which is not set", given)]
    # read ranks and alphas from the file
    path = Path(file).expanduser()
    try:
        headers = [read_header(each) for each in (sorted(path.rglob("*.safetensors")) if path.is_dir() else [path])]
        ranks = {rank for header in headers for rank in ranks_of(header)}
        alphas = {
            (str(header.path), name): alpha
            for header in headers
            for name, alpha in alphas_of(header, of_ranks=True).items()
        }
    except (ModelError, OSError) as error:
        return [Problem(place, f"auto takes the rank from {file}, which cannot be read: {error}", given)]
    if not ranks:
        return [Problem(place, f"auto takes the rank from {file}, but no module in it has a rank", given)]
    # set rank and alpha
    lora["rank"] = max(ranks)
    if lora.get("alpha") is not None or not alphas:
        return []
    for (of_file, name), alpha in alphas.items():
        if not 0 < alpha <= IMPLAUSIBLE:
            what = (
                f"auto takes the alpha from {of_file}, but {legible(name):.200} in it is {alpha:g}, which is not usable"
            )
            return [Problem(place, what, "Use another file, or give lora.rank and lora.alpha as numbers.")]
    lora["alpha"] = max(alphas.values())
    return []
