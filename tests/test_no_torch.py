"""Without torch, or with one that cannot be imported: one sentence at once, exit code 3, and nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from lora_rocm.foundation.packages import HEAVY, require_packages, unusable
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.fake_run import RECIPE, write_whole_run
from tests.wording import mentions, says

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))
TIMEOUT_S = 120.0
NOT_LIGHT = re.compile(rf"({'|'.join(HEAVY)}|functorch|torchgen|triton|__pycache__|.*\.pth)")
COMMANDS = {
    "train": ["train", "r.yaml"],
    "train unwatched": ["train", "r.yaml", "--run-dir", "run", "--no-supervisor"],
    "demo": ["demo"],
    "check": ["check", "r.yaml"],
    "plan": ["plan", "r.yaml"],
    "sample": ["sample", "whole", "--prompt", "x"],
    "export": ["export", "whole", "--format", "peft"],
    "bench transfer": ["bench", "transfer"],
    "bench compute": ["bench", "compute", "r.yaml"],
    "bench loader": ["bench", "loader", "r.yaml"],
    "bench step": ["bench", "step", "r.yaml"],
}
QUICK = ("train", "check", "sample", "bench step")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links to packages")


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the packages of the light half only; its Python."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, symlinks=True, with_pip=False)
    (own,) = folder.glob("lib/*/site-packages")
    for path in SITE.iterdir():
        if not NOT_LIGHT.match(path.name):
            (own / path.name).symlink_to(path)
    (own / "here.pth").write_text(str(ROOT), encoding="utf-8")
    return folder / "bin" / "python"


def said(python: Path, folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    write_whole_run(RunDir(folder / "whole"))
    command = [str(python), "-P", "-m", "lora_rocm", *words]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_no_torch_is_one_sentence(light: Path, tmp_path: Path, name: str) -> None:
    done = said(light, tmp_path, COMMANDS[name])
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and len(lines) == 3, done.stderr
    assert says(lines[0], "no_torch/the-package-torch-is-not-installed")
    assert lines[2].startswith("  fix:   make install; lora-rocm doctor")
    assert {path.name for path in tmp_path.iterdir()} <= {"r.yaml", "whole", "cache"}, "nothing was begun"


def test_a_torch_that_cannot_be_loaded_is_one_sentence_and_not_started_again(light: Path, tmp_path: Path) -> None:
    packages = tmp_path / "broken"
    for name in HEAVY:
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("raise OSError('libamdhip64.so.6: no such file')\n", "utf-8")
    (own,) = light.parents[1].glob("lib/*/site-packages")
    (own / "broken.pth").write_text(str(packages), encoding="utf-8")
    try:
        done = said(light, tmp_path, ["train", "r.yaml", "--run-dir", "run"])
    finally:
        (own / "broken.pth").unlink()
    assert done.returncode == 3, done.stderr
    assert says(done.stderr, "no_torch/cannot-be-imported-oserror-libamdhip64-so-6")
    assert "--repair" in done.stderr and "next start" not in done.stdout and "Restart" not in done.stdout
    assert not mentions(done.stderr + done.stdout, "no_torch/without-saying-why")


def test_here_everything_is_installed() -> None:
    """Negative control."""
    require_packages()


def test_windows_is_told_its_own_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert says(
        unusable(ModuleNotFoundError(name="torch.nn")).fix, "no_torch/scripts-windows-install-bat-lora-rocm-doctor"
    )
    assert r"install.bat --repair" in unusable(ImportError("DLL load failed while importing _C")).fix
