"""AdamW with 8-bit moments: the code, an update of bitsandbytes, and updates near to full precision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_rocm.optim.adamw_8bit import BLOCK, QuantisedMoment, code_book
from lora_rocm.recipe.optim_sections import Adamw8bitSection
from tests.optim.published import ROUNDING, deviation, followed, optimizer_of

FREE, HELD = torch.tensor(False), torch.tensor(True)
RECORD = Path(__file__).with_name("bitsandbytes_adamw_8bit.safetensors")
"""Made by ``record_bitsandbytes.py`` with bitsandbytes 0.50.2."""


def test_the_values_of_the_code_are_those_of_bitsandbytes() -> None:
    """Some of ``bitsandbytes.functional.create_dynamic_map()``, also with ``signed=False``."""
    signed, unsigned = code_book(True), code_book(False)
    assert len(signed) == len(unsigned) == 256 and bool((signed.diff() > 0).all() and (unsigned.diff() > 0).all())
    torch.testing.assert_close(signed[[0, 1, 64, 126]], torch.tensor([-0.9929687, -0.9789063, -0.0985937, -5.5e-7]))
    torch.testing.assert_close(signed[[127, 128, 254, 255]], torch.tensor([0.0, 5.5e-7, 0.9929687, 1.0]))
    torch.testing.assert_close(
        unsigned[[0, 1, 2, 128, 254]], torch.tensor([0.0, 3.25e-7, 7.75e-7, 0.1105469, 0.9964844])
    )


def test_numbers_are_kept_as_the_nearest_values_of_their_block() -> None:
    numbers_P = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    numbers_P[BLOCK : 2 * BLOCK] *= 1e-6
    numbers_P[2 * BLOCK :] = 0
    codes_P = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    moment = QuantisedMoment(codes_P, torch.zeros(64), signed=True)
    assert not moment.read().any()
    moment.write(numbers_P.clone(), FREE)
    kept_P = moment.read()
    for block in range(3):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        scale = numbers_P[part].abs().max()
        nearest = (numbers_P[part, None] - scale * code_book(True)).abs().min(1).values
        torch.testing.assert_close((kept_P[part] - numbers_P[part]).abs(), nearest, rtol=0, atol=1e-6 * float(scale))
    before = codes_P.clone()
    moment.write(torch.full_like(numbers_P, torch.nan), HELD)
    assert torch.equal(codes_P, before) and torch.equal(moment.read(), kept_P)


def updated(record: dict[str, Tensor], **how: Any) -> dict[str, Tensor]:
    """The recorded weight and its state after one more update of ours, under the names of the record."""
    section = Adamw8bitSection(**{"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0, **how})
    ours = optimizer_of(section, [record["before.weight"]])
    state, blocks = ours.state(), len(record["before.absmax1"])
    scales = state["scales"].view(2, -1)[:, :blocks]
    kept = {"state1": state["0.exp_avg"], "state2": state["0.exp_avg_sq"], "absmax1": scales[0], "absmax2": scales[1]}
    for name, tensor in kept.items():
        tensor.copy_(record[f"before.{name}"])
    state["step"].fill_(2.0)
    ours.weights.leaves["0"].grad = record["gradient"].clone()
    ours.weights.gather()
    ours.step(0, torch.zeros(()))
    return {"weight": ours.parameters["0"], **kept}


def test_an_update_is_that_of_bitsandbytes() -> None:
    """On the CPU it looks places up in a coarse table, so up to 3 of 100 are neighbours of the nearest value."""
    record = load_file(RECORD)
    after = {name.removeprefix("after."): tensor for name, tensor in record.items() if name.startswith("after.")}
    found = updated(record)
    assert deviation({"0": found["weight"]}, [after["weight"]]) < ROUNDING
    for name in ("absmax1", "absmax2"):
        torch.testing.assert_close(found[name], after[name], rtol=1e-6, atol=0)
    for number, signed in ((1, True), (2, False)):
        ours, theirs = (code_book(signed)[each[f"state{number}"].int()] for each in (found, after))
        assert float((ours != theirs).float().mean()) < 0.05 and float((ours - theirs).abs().max()) < 0.02
    for how in ({"betas": (0.8, 0.999)}, {"betas": (0.9, 0.99)}, {"epsilon": 1e-2}, {"weight_decay": 0.0}):
        assert deviation({"0": updated(record, **how)["weight"]}, [after["weight"]]) > 5 * ROUNDING, how


@pytest.mark.slow
@pytest.mark.skipif("LORA_ROCM_BITSANDBYTES" not in os.environ, reason="LORA_ROCM_BITSANDBYTES names its folder")
def test_the_record_is_what_bitsandbytes_computes(tmp_path: Path) -> None:
    made, root = tmp_path / "made.safetensors", Path(__file__).parents[2]
    search = os.pathsep.join([str(root), os.environ["LORA_ROCM_BITSANDBYTES"]])
    script = Path(__file__).with_name("record_bitsandbytes.py")
    subprocess.run([sys.executable, script, made], env={**os.environ, "PYTHONPATH": search}, check=True)
    tensors = load_file(made)
    for name, tensor in load_file(RECORD).items():
        torch.testing.assert_close(tensors.pop(name), tensor, rtol=1e-5, atol=1e-6)
    assert not tensors


def test_updates_are_near_those_of_full_precision() -> None:
    section = Adamw8bitSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0)
    ours, theirs, _ = followed(section, lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1))
    for weight, parameter in zip(ours.parameters.values(), theirs, strict=True):
        off = (weight - parameter.detach()).norm() / (6 * 1e-2 * weight.numel() ** 0.5)  # of the distance covered
        assert 0 < float(off) < 0.05
