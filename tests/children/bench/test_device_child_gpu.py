"""Both benchmarks and the memory limit on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_rocm.commands import bench
from lora_rocm.commands.output import Output
from lora_rocm.device.allocator import device_budget
from lora_rocm.device.encoder_speed import WatchedEncoder

pytestmark = pytest.mark.gpu


def test_transfer(tmp_path: Path) -> None:
    assert bench.finish(Output(), bench.transfer, tmp_path / "t.json") == 0
    saved = json.loads((tmp_path / "t.json").read_bytes())
    assert saved["machine"]["gpu"] and all(row["problem"] is None for row in saved["rows"])
    rates = {(row["copy"], row["memory"]): row["per_second"] for row in saved["rows"] if row["size_bytes"] == 2**28}
    assert rates["host to device", "pinned"] > 1e9 and rates["device to host", "pinned"] > 1e9
    assert rates["device to device", "one GPU"] > rates["host to device", "pinned"]
    assert rates["both at once", "pinned"] > 0.9 * rates["host to device", "pinned"]


def test_compute(tmp_path: Path) -> None:
    """Products, attention and convolutions of a recipe; larger products reach a higher rate."""
    measure = partial(bench.compute, "demo.yaml", ("data.resolution=512", "train.mixed_precision=bf16"))
    assert bench.finish(Output(), measure, tmp_path / "c.json") == 0
    rows = json.loads((tmp_path / "c.json").read_bytes())["rows"]
    assert {row["group"] for row in rows} == {"gemm", "attention", "convolution"}
    assert all(row["per_second"] for row in rows if row["group"] != "attention")
    assert all(row["per_second"] for row in rows if row["way"] == "math")
    products = sorted((row for row in rows if row["group"] == "gemm"), key=lambda row: row["amount"])
    assert products[-1]["per_second"] > products[0]["per_second"]
    assert {row["way"].split()[-1] for row in rows if row["group"] == "convolution"} == {"on", "off"}


LIMITED = """
import torch
from lora_rocm.device.allocator import limit
device = torch.device("cuda")
assert limit(device, 2**30) == 2**30
kept = torch.zeros(700 * 2**20, dtype=torch.uint8, device=device)
try:
    torch.zeros(700 * 2**20, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    print("raised")
"""


@pytest.mark.parametrize(("line", "said"), [("", "raised"), ("assert limit(device, 2**30) == 2**30", "")])
def test_a_full_allocator_raises(line: str, said: str) -> None:
    """In a separate process, because the limit stays; without it the same allocations fit."""
    code = LIMITED.replace(line, "pass") if line else LIMITED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and done.stdout.strip() == said, done.stderr


def test_an_encoder_that_is_found_slow_agrees_with_the_other_way() -> None:
    """Real convolutions under a clock that claims them to be slow with cuDNN or MIOpen."""
    device = torch.device("cuda")
    kernel = torch.randn(16, 3, 3, 3, device=device)
    ways: list[bool] = []

    def encode(pixels_CHW: Tensor | str) -> dict[str, Tensor]:
        assert isinstance(pixels_CHW, Tensor)
        ways.append(torch.backends.cudnn.enabled)
        return {"latent_mean": torch.nn.functional.conv2d(pixels_CHW[None].to(device), kernel).cpu()}

    said: list[str] = []
    now = iter([0.0, 90.0, 100.0, 190.0, 200.0, 201.0, 300.0, 301.0])
    watching = WatchedEncoder(encode, device, said.append, clock=now.__next__)
    pixels_CHW = torch.rand(3, 1280, 1280)
    first, second = watching(pixels_CHW), watching(pixels_CHW)
    assert ways == [True, True, False, False] and len(said) == 1
    assert torch.allclose(first["latent_mean"], second["latent_mean"], atol=1e-3)


def test_budget_is_what_the_device_has() -> None:
    device = torch.device("cuda")
    assert 2**30 < device_budget(device) <= torch.cuda.get_device_properties(device).total_memory
