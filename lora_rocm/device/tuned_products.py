"""Matrix products by the solutions of a table (PyTorch's TunableOp). Training reads a table and never tunes."""

from __future__ import annotations

import torch
from torch.cuda import tunable

from lora_rocm.errors import MachineError


def use_table(path: str) -> None:
    """Use the solutions of a table from now on; products that it lacks are computed as without it.

    Raises:
        MachineError: torch refuses the table, because it is of other libraries, or cannot read it.
    """
    tunable.set_filename(path)  # else torch also looks for a file in the current folder
    tunable.tuning_enable(False)
    tunable.record_untuned_enable(False)
    tunable.enable(True)
    if torch.cuda.is_available():  # on ROCm only the first product registers what a table is checked against
        some = torch.ones(16, 16, device="cuda")
        torch.mm(some, some)
    if not tunable.read_file(path):
        raise MachineError(
            "products-refused",
            "PyTorch refuses this table of matrix products: it was tuned with other libraries, or is damaged.",
            where=path,
            fix="lora-rocm tune makes a new one for new runs. To go on without: --set runtime.profile=safe",
        )
