"""Reads the ranks and alphas of an adapter file: its header, and the few bytes of the alpha tensors."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter

from lora_rocm.model_files.header import TensorFileHeader

DOWN = re.compile(r"[._]lora[._](?:down|A)\.(?:default\.)?weight$|\.(?:hada_w1_b|lokr_w2_b)$")
"""Matches the end of the name of a tensor that has the module's rank as its first dimension."""
NUMBERS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


def ranks_of(header: TensorFileHeader) -> Counter[int]:
    """Return the number of modules of each rank.

    Modules without a rank, such as LoKr with undecomposed factors, are not counted.
    """
    return Counter(entry.shape[0] for name, entry in header.tensors.items() if entry.shape and DOWN.search(name))


def alphas_of(header: TensorFileHeader, *, of_ranks: bool = False) -> dict[str, float]:
    """Return the alphas, keyed by the name of the alpha tensor.

    ``of_ranks``: only modules with a rank are included, because their alpha is divided by the rank.

    Raises:
        OSError: the file cannot be read.
    """
    found = {}
    modules = {DOWN.sub("", name) for name in header.tensors if DOWN.search(name)}
    with header.path.open("rb") as file:
        for name, entry in header.tensors.items():
            if of_ranks and name.removesuffix(".alpha") not in modules:
                continue
            if name.endswith(".alpha") and entry.end - entry.begin <= 8 and math.prod(entry.shape) == 1:
                file.seek(entry.begin)
                content = file.read(entry.end - entry.begin)
                if entry.dtype == "BF16":
                    found[name] = struct.unpack("<f", b"\0\0" + content)[0]
                elif entry.dtype in NUMBERS and content:
                    found[name] = float(struct.unpack(NUMBERS[entry.dtype], content)[0])
    return found
