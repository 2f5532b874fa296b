"""A resume computes with the kernels of the run's first start, even if more was proven since: the same bytes.

On a CPU no Triton kernel can be launched. Here the "Triton" kernel of GEGLU is plain PyTorch that rounds differently,
and all others are plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_choice import FACT
from lora_rocm.families.common.unet import fused_unet
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.kernels import backend
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.optim import base as optim_base
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.checkpoint_record import sealed
from lora_rocm.rundir.layout import STATE_FILE, RunDir
from tests.event_lines import read_events
from tests.train.runs import bytes_of, make_recipe, material, start

pytest.importorskip("triton")
GEGLU, RESIDUAL = "gated.gated: gelu", "norms.residual: bias"
__all__ = ["material"]


class Proofs:
    """In place of the comparisons, which are in time or late, and pass or fail."""

    def __init__(self) -> None:
        self.in_time, self.compared, self.wrong = True, list[str](), False

    def first_wrong(self, device: torch.device, dtype: torch.dtype, cases: Any) -> str | None:
        self.compared += [kernel for case in cases for kernel in case.kernels]
        return "it has wrong numbers" if self.wrong else None


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proofs]:
    found, real, gated = Proofs(), backend.decided, fused_unet.gated

    def decided(implementation: str, kernel: Callable[[], str]) -> str:
        return "eager"

    def geglu(activation: Any, implementation: Any, a: Tensor, g: Tensor | None = None) -> Tensor:
        output: Tensor = gated(activation, "eager", a, g)
        return output * 1.01 if real(implementation, lambda: GEGLU) == "triton" else output

    def choose(*given: Any, limit_s: float | None, **how: Any) -> Any:
        limited = None if limit_s is None else limit_s if found.in_time else -1.0
        return original(*given, limit_s=limited, **how)

    original = kernel_choice.choose
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")
    monkeypatch.setattr(kernel_choice, "choose", choose)
    monkeypatch.setattr(kernel_choice, "first_wrong", found.first_wrong)
    monkeypatch.setattr(kernel_choice, "refusal", lambda device: None)
    monkeypatch.setattr(backend, "available", lambda device: True)
    monkeypatch.setattr(backend, "decided", decided)
    monkeypatch.setattr(fused_unet, "gated", geglu)
    monkeypatch.setattr(optim_base, "implementation_for", lambda *_: "eager")
    monkeypatch.setattr(MemoryManager, "kernels", (GEGLU, RESIDUAL))
    yield found
    backend.use_plain(())


def stored(run: Path) -> Any:
    return json.loads((RunDir(run).list_checkpoints()[-1][1] / STATE_FILE).read_bytes())["facts"][FACT]


def straight(recipe: Recipe, run: Path) -> bytes:
    assert start(recipe, run)
    return bytes_of(run)


def test_a_resume_gives_the_same_bytes_on_both_sides_of_a_proof(
    proofs: Proofs, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(material)
    # Not proven in time: plain, in each resume too
    proofs.in_time = False
    plain = straight(recipe, tmp_path / "plain")
    assert stored(tmp_path / "plain") == {"triton": True, "plain": [GEGLU, RESIDUAL]}
    stopped = tmp_path / "stopped"
    assert not start(recipe, stopped, stop_at=2)
    proofs.in_time = True
    fused = straight(recipe, tmp_path / "fused")
    assert stored(tmp_path / "fused") == {"triton": True, "plain": []} and fused != plain, "the next run uses it"
    assert start(recipe, stopped) and bytes_of(stopped) == plain, "it was proven since"
    assert stored(stopped) == {"triton": True, "plain": [GEGLU, RESIDUAL]}
    told = read_events(RunDir(stopped).events(), "kernels")
    assert [event["plain"] for event in told if not event["kernel"]] == [[GEGLU, RESIDUAL]] * 2
    # Proven: used, in each resume too, after the proof is made again
    begun = tmp_path / "begun"
    assert not start(recipe, begun, stop_at=2)
    monkeypatch.setenv(STACK, "driver 2, GPU 1")
    proofs.in_time, proofs.compared = False, []
    assert start(recipe, begun) and bytes_of(begun) == fused and GEGLU in proofs.compared, "of another driver"


def test_a_checkpoint_without_a_decision_resumes_as_before(proofs: Proofs, material: Path, tmp_path: Path) -> None:
    """It decides again at each start: the control, with other bytes."""
    recipe, run = make_recipe(material), tmp_path / "run"
    proofs.in_time = False
    plain = straight(recipe, tmp_path / "plain")
    assert not start(recipe, run, stop_at=2)
    path = RunDir(run).list_checkpoints()[-1][1] / STATE_FILE
    state = json.loads(path.read_bytes())
    del state["facts"][FACT]
    state.pop("seal", None)
    path.write_bytes(sealed(state))
    proofs.in_time = True
    assert start(recipe, run) and bytes_of(run) != plain and stored(run) == {"triton": True, "plain": []}


def test_a_deterministic_run_waits_for_all_proofs(proofs: Proofs, material: Path, tmp_path: Path) -> None:
    proofs.in_time = False
    assert start(make_recipe(material, runtime={"deterministic": True}), tmp_path / "run")
    assert stored(tmp_path / "run") == {"triton": True, "plain": []} and {GEGLU, RESIDUAL} < {*proofs.compared}


def test_a_wrong_kernel_is_used_in_no_start(proofs: Proofs, material: Path, tmp_path: Path) -> None:
    recipe, run = make_recipe(material), tmp_path / "run"
    proofs.wrong = True
    assert not start(recipe, run, stop_at=2) and stored(run) == {"triton": False, "plain": []}
    proofs.wrong = False
    assert start(recipe, run) and stored(run) == {"triton": False, "plain": []}
    proofs.in_time = False
    assert straight(recipe, tmp_path / "plain") != b""


def test_a_run_on_the_cpu_decides_nothing(material: Path, tmp_path: Path) -> None:
    assert start(make_recipe(material), tmp_path / "run") and stored(tmp_path / "run") is None
