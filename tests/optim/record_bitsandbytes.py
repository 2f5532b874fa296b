"""Records an update of bitsandbytes' 8-bit AdamW on the CPU, with which ours is compared.

The tests do not require bitsandbytes: PEFT imports it wherever it is installed, which takes each process seconds.

    pip install --no-deps --target FOLDER bitsandbytes==0.50.2
    PYTHONPATH=.:FOLDER python tests/optim/record_bitsandbytes.py tests/optim/bitsandbytes_adamw_8bit.safetensors
"""

from __future__ import annotations

import sys

import torch
from bitsandbytes.optim import AdamW8bit
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.optim.published import gradients_of, start_of

SHAPE, UPDATES = (64, 64), 3  # it keeps weights of less than 4096 numbers in 32 bits


def main(path: str) -> None:
    """Write the weight and its state before and after the last update, and the gradient of that update."""
    weight = nn.Parameter(start_of([SHAPE])[0])
    optimizer = AdamW8bit([weight], lr=1e-2, weight_decay=0.1)
    tensors: dict[str, Tensor] = {}
    for number, (gradient,) in enumerate(gradients_of(UPDATES, [SHAPE]), start=1):
        weight.grad = gradient.clone()
        optimizer.step()
        if number >= UPDATES - 1:
            when, state = "before" if number < UPDATES else "after", optimizer.state[weight]
            kept = {
                "weight": weight.detach(),
                **{name: state[name] for name in ("state1", "state2", "absmax1", "absmax2")},
            }
            tensors |= {f"{when}.{name}": tensor.clone() for name, tensor in kept.items()}
            tensors["gradient"] = gradient
    save_file(tensors, path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
