"""Registers, LDS and occupancy of the Triton kernels on AMD GPUs: no more than recorded, and nothing spills."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.registers import (  # noqa: E402
    CARDS,
    COMMAND,
    SDXL_STEP,
    Launch,
    Used,
    counted,
    faults,
    launches,
    recorded_in,
    used,
)
from lora_rocm.hardware.archs import triton_takes  # noqa: E402

ROOT = Path(__file__).parents[2]
HOW = f"If that is meant, record it, in the same commit: {COMMAND}"
TAKEN = [gfx for gfx in CARDS if triton_takes(triton.__version__, gfx)]


@pytest.fixture(scope="module")
def sdxl() -> dict[str, Launch]:
    return launches(torch.bfloat16, SDXL_STEP)


def worst(names: Iterable[str], gfx: str) -> list[str]:
    """The launch of each kernel that takes the most registers."""
    rows = recorded_in(triton.__version__).get(gfx, {})
    ordered = sorted(names, key=lambda name: rows.get(name, [0])[0])
    return list({name.partition(" ")[0]: name for name in ordered}.values())


def check(gfx: str, found: dict[str, Used]) -> None:
    assert [f"{gfx}, {name}: spills" for name, now in found.items() if now.spilled] == []
    assert [name for name, now in found.items() if now.waves != CARDS[gfx].waves(now.vgprs)] == []
    recorded = recorded_in(triton.__version__)
    if not recorded:
        pytest.skip(f"nothing is recorded of Triton {triton.__version__}; to record it: {COMMAND}")
    told = list(faults(recorded, gfx, found))
    assert not told, "\n  ".join(["A kernel takes more of an AMD GPU:", *told, HOW])


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"], ids=["wave 32", "wave 64"])
def test_the_largest_launch_of_each_kernel_spills_nothing_and_takes_no_more_than_recorded(
    sdxl: dict[str, Launch], gfx: str
) -> None:
    """Every launch of a step: the slow test below."""
    names = worst(sdxl, gfx)
    assert len(sdxl) > 40 and len(names) == len({name.partition(" ")[0] for name in sdxl}) >= 18
    check(gfx, {name: used(sdxl[name], gfx) for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("gfx", TAKEN)
def test_every_launch_takes_no_more_than_recorded_and_every_row_is_a_launch(gfx: str) -> None:
    found = counted(gfx)
    check(gfx, found)
    assert recorded_in(triton.__version__)[gfx].keys() == found.keys()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("folder", os.environ.get("LORA_ROCM_OTHER_TRITON", "").split(os.pathsep))
def test_another_triton_takes_no_more_than_recorded(folder: str) -> None:
    """LORA_ROCM_OTHER_TRITON: as in ``test_triton``."""
    if not folder:
        pytest.skip("LORA_ROCM_OTHER_TRITON names no folder")
    command = [sys.executable, "-m", "pytest", str(Path(__file__)), "-m", "slow", "-k", "every_launch"]
    env = {**os.environ, "PYTHONPATH": folder, "LORA_ROCM_OTHER_TRITON": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("gfx", "vgprs", "waves"),
    [("gfx1100", 96, 16), ("gfx1100", 97, 12), ("gfx1100", 256, 5), ("gfx1030", 65, 12), ("gfx942", 64, 8)]
    + [("gfx942", 65, 7), ("gfx942", 512, 1), ("gfx1201", 1, 16)],
)
def test_waves(gfx: str, vgprs: int, waves: int) -> None:
    assert CARDS[gfx].waves(vgprs) == waves


def test_a_kernel_that_spills_is_seen(sdxl: dict[str, Launch]) -> None:
    launch = sdxl[next(name for name in worst(sdxl, "gfx1100") if name.startswith("input_gradient"))]
    narrow = replace(launch, options={**launch.options, "waves_per_eu": 16})
    with pytest.raises(AssertionError, match=f"gfx1100, {narrow.name}: spills"):
        check("gfx1100", {narrow.name: used(narrow, "gfx1100")})


def test_what_takes_more_than_recorded_is_named_with_card_and_number() -> None:
    now = Used(vgprs=71, lds_bytes=64, waves=16, spilled=0)

    def told(*row: int) -> list[str]:
        return list(faults({"gfx1100": {"moments": list(row)}}, "gfx1100", {"moments": now}))

    assert told(71, 64, 16) == told(72, 128, 15) == []
    assert told(70, 64, 16) == ["gfx1100, moments: 71 VGPRs, 70 recorded"]
    assert told(71, 63, 17) == [
        "gfx1100, moments: 64 bytes of LDS, 63 recorded",
        "gfx1100, moments: 16 waves, 17 recorded",
    ]
    assert list(faults({}, "gfx942", {"moments": now})) == ["gfx942, moments: not recorded"]
