"""One rank of a run on the CPU, with the token embedding in main memory if the first argument is 1.

The last line that it prints is the number of bytes of rows that it has sent.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lora_rocm.device.placement.embedding_rows import EmbeddingRows
from lora_rocm.families.base import LoadedModel, ModelFamily, token_table
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.train import worker


def main(in_main_memory: bool, run_dir: str) -> int:
    """Train, and return the exit code of the worker."""
    sent, whole = list[int](), EmbeddingRows.sent

    def table(self: MemoryManager, family: ModelFamily, model: LoadedModel) -> object:
        return token_table(family, model) if in_main_memory else None

    def counted(self: EmbeddingRows, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = whole(self, tensors)
        sent.append(sum(rows.nbytes for rows in found.values()))
        return found

    MemoryManager._table = table  # type: ignore[method-assign, assignment]
    EmbeddingRows.sent = counted  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    code = worker.main([run_dir])
    print(f"\n{sum(sent)}")  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] == "1", sys.argv[2]))
