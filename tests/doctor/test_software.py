"""Libraries beside torch: the doctor can only speak of those that the probe looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.doctor.software import BESIDE
from lora_rocm.host.sources import Look, Sources
from lora_rocm.host.torch_files import installed


@pytest.mark.parametrize("package", sorted({row.package for row in BESIDE} | {"torchvision"}))
def test_the_probe_looks_for_every_library_that_the_doctor_speaks_of(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}-1.2.3.dist-info").mkdir()
    look = Look(Sources("linux", environ={}, site_packages=(tmp_path,), app_dir=tmp_path / "app"))
    libraries = {name.replace("-", "_"): version for name, version in installed(look, deep=False)[1].items()}
    assert libraries == {package: "1.2.3"}
