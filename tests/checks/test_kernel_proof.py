"""A proof of the kernels holds until something changes that it depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.checks import kernel_check, kernel_choice, kernel_proof
from lora_rocm.checks.kernel_choice import choose
from lora_rocm.checks.kernel_proof import Proof, with_imported
from lora_rocm.hardware.software_stack import STACK
from tests.event_lines import hearing

pytest.importorskip("triton")
HERE = {STACK: "driver 1, GPU 1", "HOME": "/home/somebody"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))


def test_it_is_asked_for_again_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "norm.py").write_text(
        "def norm():\n    from lora_rocm.kernels.norm_triton import launch", encoding="utf-8"
    )
    for name in ("norm_triton", "other"):
        (folder / f"{name}.py").write_text("x = 1", encoding="utf-8")

    def proof(dtype: torch.dtype = torch.bfloat16, case: str = "norm of 2x3", **others: str) -> Proof:
        with_imported.cache_clear()
        return Proof(dtype, case, ["norm"], {**HERE, **others}, folder)

    assert not proof().is_known
    proof().keep()
    assert proof().is_known and proof(HOME="/home/somebody else").is_known, "the control"
    assert not proof(torch.float16).is_known and not proof(case="norm of 2x4").is_known
    assert not proof(**{STACK: "driver 2, GPU 1"}).is_known
    assert not proof(HSA_OVERRIDE_GFX_VERSION="11.0.0").is_known and not proof(TRITON_CACHE_DIR="x").is_known
    for where, name in ((torch, "__version__"), (kernel_proof, "triton_version")):
        with monkeypatch.context() as changed:
            changed.setattr(where, name, "0.0.0" if where is torch else lambda: "0.0.0")
            assert not proof().is_known
    (folder / "other.py").write_text("x = 2", encoding="utf-8")
    assert proof().is_known, "the code of another kernel does not matter"
    (folder / "norm_triton.py").write_text("x = 2", encoding="utf-8")
    assert not proof().is_known, "code that is imported in a function counts"


def test_each_kernel_is_compared_once_and_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, wrong, fingerprints = list[str](), ["it has wrong numbers"], kernel_check.FINGERPRINTS.name

    def first_wrong(device: torch.device, dtype: torch.dtype, cases: Any) -> str | None:
        compared.extend(case.name for case in cases)
        return wrong.pop(0) if wrong else None

    monkeypatch.setattr(kernel_choice, "first_wrong", first_wrong)
    monkeypatch.setenv(STACK, HERE[STACK])
    said = list[str]()

    def trusted(*kernels: str) -> bool:
        return choose(torch.device("cuda"), torch.bfloat16, kernels, context=hearing(said)).triton

    assert not trusted("gated.gated: gelu") and compared == [fingerprints]
    assert trusted("gated.gated: gelu") and compared == [fingerprints, fingerprints, "GEGLU"]
    said.clear()
    assert trusted("gated.gated: gelu") and len(compared) == 3 and not said
    assert trusted("gated.gated: gelu", "norms.residual: bias") and compared[3:] == ["residual sum"]
    assert len(said) == 1 and "1 kernel" in said[0]


def test_without_a_known_driver_nothing_is_kept(tmp_path: Path) -> None:
    Proof(torch.bfloat16, "a", [], {}).keep()
    assert not Proof(torch.bfloat16, "a", [], {}).is_known and not (tmp_path / "home").exists()


def test_the_code_of_a_kernel_is_that_of_its_plain_and_its_compiled_form() -> None:
    names = {path.name for path in with_imported(kernel_proof.KERNELS, "norms")}
    assert {"norms.py", "backend.py", "add_norm_triton.py", "group_norm_triton.py"} <= names
    assert not names & {"rotary.py", "rotary_triton.py", "token_loss.py"}
    for case in kernel_check.CASES:
        assert (kernel_proof.KERNELS / f"{case.kernels[0].partition('.')[0]}.py").is_file()
