"""The setup of .venv: which torch, and that one which is there is never replaced. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CPU = "https://download.pytorch.org/whl/cpu"
GOOD_TORCH = {"python": [3, 12], "release": "2.12.0", "torch": "2.12.0+rocm7.2", "cuda": None, "hip": "7.2"}
NO_TORCH = {"python": [3, 12]}


@pytest.fixture
def setup_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Venv:
    """A ``.venv`` that is only a folder: ``commands`` records what its Python was told; those in ``failing`` fail."""

    def __init__(self, setup_venv: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        self.failing: str = "no command"
        self.found: list[dict[str, Any]] = []
        self.folder = folder / ".venv"
        monkeypatch.setattr(setup_venv, "VENV", self.folder)
        monkeypatch.setattr(setup_venv, "STAMP", self.folder / ".installed")
        monkeypatch.setattr(setup_venv, "python", self.python)
        monkeypatch.setattr(setup_venv, "probe", self.probe)
        monkeypatch.setattr(setup_venv, "seen_gpu", lambda: "")
        monkeypatch.setattr(sys, "argv", ["setup_venv.py", "--dev"])
        python = setup_venv.venv_python()
        python.parent.mkdir(parents=True)
        python.touch()

    def python(self, *arguments: str, hush_errors: bool = False) -> bool:
        self.commands.append(" ".join(arguments))
        return self.failing not in self.commands[-1]

    def probe(self) -> dict[str, Any]:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    @property
    def torch_installs(self) -> list[str]:
        return [command for command in self.commands if re.search(r"install torch\b", command)]


@pytest.fixture
def venv(setup_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Venv:
    for name in ("LORA_ROCM_TORCH", "LORA_ROCM_TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return Venv(setup_venv, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("gpu", "windows", "environ", "expected"),
    [
        ("", False, {}, ("torch==2.13.0", CPU)),
        ("", True, {}, ("torch==2.13.0", CPU)),
        ("amd", False, {}, ("torch==2.13.0", "https://download.pytorch.org/whl/rocm7.2")),
        ("nvidia", False, {}, ("torch==2.13.0", None)),
        ("nvidia", True, {}, ("torch==2.13.0", "https://download.pytorch.org/whl/cu130")),
        ("amd", True, {"LORA_ROCM_TORCH_INDEX": "https://a/b"}, ("torch>=2.11", "https://a/b")),
        ("amd", False, {"LORA_ROCM_TORCH": "torch==2.11.0"}, ("torch==2.11.0", None)),
    ],
)
def test_torch_for_the_machine(
    setup_venv: ModuleType, gpu: str, windows: bool, environ: dict[str, str], expected: tuple[str, str | None]
) -> None:
    assert setup_venv.choose_torch(gpu, windows, environ)[:2] == expected


def test_amd_under_windows_gets_no_cpu_torch_unasked(setup_venv: ModuleType) -> None:
    with pytest.raises(setup_venv.SetupError, match="LORA_ROCM_TORCH_INDEX"):
        setup_venv.choose_torch("amd", True, {})


def test_a_torch_that_is_there_is_kept(setup_venv: ModuleType, venv: Venv) -> None:
    venv.found = [GOOD_TORCH]
    assert setup_venv.main() == 0
    assert venv.torch_installs == []
    (constraint,) = venv.folder.glob("*constraint*")
    assert constraint.read_text(encoding="utf-8") == "torch==2.12.0\n"
    assert str(constraint) in venv.commands[-1]


def test_a_torch_that_cannot_be_imported_is_kept_too(setup_venv: ModuleType, venv: Venv) -> None:
    venv.found = [{"python": [3, 12], "release": "2.12.0", "broken": "libhsa is missing"}]
    with pytest.raises(setup_venv.SetupError, match="libhsa is missing"):
        setup_venv.main()
    assert venv.torch_installs == []


def test_torch_is_installed_where_there_is_none(setup_venv: ModuleType, venv: Venv) -> None:
    venv.found = [NO_TORCH, NO_TORCH, GOOD_TORCH]
    assert setup_venv.main() == 0
    assert len(venv.torch_installs) == 1
    assert f"torch==2.13.0 --index-url {CPU}" in venv.torch_installs[0]


def test_the_default_index_serves_where_the_vendors_does_not_answer(
    setup_venv: ModuleType, venv: Venv, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.found, venv.failing = [NO_TORCH, NO_TORCH, GOOD_TORCH], "--index-url"
    assert setup_venv.main() == 0
    assert [f"--index-url {CPU}" in command for command in venv.torch_installs] == [True, False]
    assert "no answer" in capsys.readouterr().out


def test_an_index_that_the_user_named_has_no_substitute(
    setup_venv: ModuleType, venv: Venv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_ROCM_TORCH_INDEX", CPU)
    venv.found, venv.failing = [NO_TORCH], "--index-url"
    with pytest.raises(setup_venv.SetupError, match="could not be installed"):
        setup_venv.main()
    assert len(venv.torch_installs) == 1


def test_the_second_time_nothing_is_done(setup_venv: ModuleType, venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.found = [GOOD_TORCH]
    setup_venv.main()
    venv.commands.clear()
    assert setup_venv.main() == 0
    monkeypatch.setattr(sys, "argv", ["setup_venv.py"])  # less than what is there
    assert setup_venv.main() == 0
    assert venv.commands == []


def test_done_again_after_a_failure(setup_venv: ModuleType, venv: Venv) -> None:
    venv.found, venv.failing = [GOOD_TORCH], "-e"
    with pytest.raises(setup_venv.SetupError, match="2.12.0"):
        setup_venv.main()
    venv.failing = "no command"
    venv.commands.clear()
    assert setup_venv.main() == 0
    assert venv.commands != []


def test_the_tools_are_added_to_a_venv_without_them(
    setup_venv: ModuleType, venv: Venv, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.found = [GOOD_TORCH]
    monkeypatch.setattr(sys, "argv", ["setup_venv.py"])
    setup_venv.main()
    assert not venv.commands[-1].endswith("[dev]")
    monkeypatch.setattr(sys, "argv", ["setup_venv.py", "--dev"])
    setup_venv.main()
    assert venv.commands[-1].endswith("[dev]")


def test_an_old_python_is_refused(setup_venv: ModuleType, venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_venv, "OLDEST_PYTHON", (99, 0))
    with pytest.raises(setup_venv.SetupError, match="or newer is needed"):
        setup_venv.main()


def test_bounds_agree_with_the_project(setup_venv: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert setup_venv.ANY_TORCH in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, setup_venv.OLDEST_PYTHON))
