"""A proof of the kernels holds until something changes that it depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_rocm.checks import kernel_check, kernel_proof
from lora_rocm.checks.kernel_proof import Proof
from lora_rocm.hardware.software_stack import STACK

pytest.importorskip("triton")
HERE = {STACK: "driver 1, GPU 1", "HOME": "/home/somebody"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))


def test_it_is_asked_for_again_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "kernels" / "norm.py"
    code.parent.mkdir()
    code.write_text("x = 1", encoding="utf-8")

    def known(dtype: torch.dtype = torch.bfloat16, **others: str) -> bool:
        return Proof(dtype, {**HERE, **others}, (code.parent,)).is_known

    assert not known()
    Proof(torch.bfloat16, HERE, (code.parent,)).keep()
    assert known() and known(HOME="/home/somebody else"), "the control"
    assert not known(torch.float16) and not known(**{STACK: "driver 2, GPU 1"})
    assert not known(HSA_OVERRIDE_GFX_VERSION="11.0.0") and not known(TRITON_CACHE_DIR="x")
    for where, name in ((torch, "__version__"), (kernel_proof, "triton_version")):
        with monkeypatch.context() as changed:
            changed.setattr(where, name, "0.0.0" if where is torch else lambda: "0.0.0")
            assert not known()
    code.write_text("x = 2", encoding="utf-8")
    assert not known()


def test_kernels_are_compared_once_and_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, wrong = list[torch.dtype](), ["GEGLU has wrong numbers", None]

    def first_wrong(device: torch.device, dtype: torch.dtype) -> str | None:
        compared.append(dtype)
        return wrong.pop(0)

    monkeypatch.setattr(kernel_check, "first_wrong", first_wrong)
    monkeypatch.setenv(STACK, HERE[STACK])
    said = list[str]()
    found = [kernel_check.trusted(torch.device("cuda"), torch.bfloat16, said.append) for _ in range(3)]
    assert found == [False, True, True] and len(compared) == 2 and len(said) == 1


def test_without_a_known_driver_nothing_is_kept(tmp_path: Path) -> None:
    Proof(torch.bfloat16, {}).keep()
    assert not Proof(torch.bfloat16, {}).is_known and not (tmp_path / "home").exists()
