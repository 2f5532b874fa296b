"""Postponed imports give the same objects, and a run imports no more than it uses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lora_rocm.processes import model_table
from lora_rocm.processes.lazy_packages import PACKAGES, POSTPONE, postponed
from lora_rocm.processes.model_table import decoded, encoded, path_of, use_kept_table

ROOT = Path(__file__).parents[2]
INIT = '''
"""A package."""
from typing import TYPE_CHECKING
from .a import First, other as Second
from .b import used_here, Third
from . import c
from .d import *
if TYPE_CHECKING or True:
    from .e import Fourth
    from .f import f
try:
    from .g import Fifth
except ImportError:
    Fifth = None
def late():
    from .h import Sixth
    return Sixth
used_here()
'''
FORBIDDEN = (
    "bitsandbytes", "torchao", "torchvision", "sklearn", "scipy", "pandas", "datasets", "tensorboard", "wandb",
    "peft.tuners.adalora", "peft.tuners.xlora", "peft.tuners.vera", "peft.tuners.boft",
    "diffusers.models.transformers.transformer_wan", "diffusers.models.transformers.transformer_qwenimage",
    "diffusers.models.autoencoders.autoencoder_kl_cogvideox", "diffusers.models.controlnets",
    "diffusers.pipelines.flux.pipeline_flux", "diffusers.modular_pipelines",
)  # fmt: skip
"""Modules that no run needs before its first step."""
OTHERS = {
    "sdxl": (
        "lora_rocm.families.flux.family",
        "diffusers.models.transformers.transformer_flux",
        "transformers.models.t5",
    ),
    "flux": ("lora_rocm.families.sdxl.family", "diffusers.pipelines", "transformers.models.qwen3"),
    "causal_lm": ("diffusers", "lora_rocm.families.sdxl.family"),
}
"""Modules of other families, by family."""
STARTED = """
import importlib, json, sys
from lora_rocm.processes import lazy_packages
if sys.argv[2] == "postponed":
    lazy_packages.install()
import lora_rocm.train.worker
from lora_rocm.checks.attention_routes import checked_attention
from lora_rocm.train import pipeline
importlib.import_module(f"lora_rocm.families.{sys.argv[1]}.family")
modules = sorted(name for name, module in sys.modules.items() if module is not None)
from peft import LoHaConfig, PeftModel, inject_adapter_in_model
from peft.tuners import LoraModel
from diffusers.models.transformers import FluxTransformer2DModel
from diffusers.models.autoencoders import AutoencoderKL
same = [f"{it.__module__}.{it.__qualname__}" for it in (
    LoHaConfig, PeftModel, inject_adapter_in_model, LoraModel, FluxTransformer2DModel, AutoencoderKL)]
import diffusers.models.transformers, peft, transformers
missing = [name for name in peft.__all__ if not hasattr(peft, name)]
from transformers.utils.import_utils import define_import_structure
table = define_import_structure(transformers.__path__[0] + "/models")
table = [[sorted(key), sorted([module, sorted(names)] for module, names in it.items())] for key, it in table.items()]
print(json.dumps({"modules": modules, "same": same, "missing": missing, "table": table}))
"""


def started(family: str, how: str, home: Path) -> dict[str, Any]:
    """The modules of a process after the imports of a worker of this family, and some of its objects."""
    env = {**os.environ, "LORA_ROCM_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", STARTED, family, how]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def found_in(modules: list[str], forbidden: tuple[str, ...]) -> list[str]:
    return [name for name in forbidden if any(f"{module}.".startswith(f"{name}.") for module in modules)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def require_own(family: str, modules: list[str]) -> None:
    assert found_in(modules, (*FORBIDDEN, *OTHERS[family])) == []
    assert f"lora_rocm.families.{family}.family" in modules and "peft.tuners.lora" in modules


def test_a_worker_imports_what_its_run_uses_and_gets_the_same_objects(home: Path) -> None:
    """One test, because each of its three processes takes seconds."""
    plain, late = (started("sdxl", how, home) for how in ("plain", "postponed"))
    again = started("causal_lm", "postponed", home)
    require_own("sdxl", late["modules"])
    require_own("causal_lm", again["modules"])
    assert plain["same"] == late["same"] == again["same"] and not late["missing"]
    assert plain["table"] == late["table"] == again["table"], "read, read and kept, and from the file"
    assert list(home.glob(f"{model_table.PREFIX}*.json"))
    assert found_in(plain["modules"], FORBIDDEN), "without it they are imported"
    assert len(late["modules"]) < len(plain["modules"]) - 250


@pytest.mark.slow
def test_a_worker_for_flux_imports_what_its_run_uses(home: Path) -> None:
    require_own("flux", started("flux", "postponed", home)["modules"])


def test_an_import_is_postponed_only_where_nobody_sees_it(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("f = 1", encoding="utf-8")
    told = ast.unparse(postponed(ast.parse(INIT), tmp_path))
    assert [line.strip() for line in told.splitlines() if POSTPONE in line] == [
        f"{POSTPONE}('a', {{'First': 'First', 'Second': 'other'}})",
        f"{POSTPONE}('e', {{'Fourth': 'Fourth'}})",
    ]
    for kept in (
        "from .b import used_here, Third",
        "from . import c",
        "from .d import *",
        "from .f import f",
        "    from .g import Fifth",
        "    from .h import Sixth",
    ):
        assert kept in told


def test_the_packages_still_have_such_files() -> None:
    site = Path(sysconfig.get_path("purelib"))
    for package in PACKAGES:
        folder = site.joinpath(*package.split("."))
        told = ast.unparse(postponed(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")), folder))
        assert told.count(POSTPONE) > 2, package


class Module:
    """In place of ``transformers.utils.import_utils``."""

    def __init__(self, package: Path) -> None:
        self.__file__, self.calls = str(package / "utils" / "import_utils.py"), 0
        self.create_import_structure_from_path = self._read

    def _read(self, path: str) -> dict[Any, Any]:
        self.calls += 1
        named = frozenset({"torch"})
        return {"b": {frozenset(): {"x": {"B", "A"}}}, named: {"z": {Path(path).name}}, "a": {named: {"y": {"C"}}}}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    record = tmp_path / "site" / "transformers-9.9.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("one file", encoding="utf-8")
    return tmp_path / "site" / "transformers"


def read(package: Path, path: Path | None = None) -> tuple[dict[Any, Any], int]:
    """The table in a new process, and how often the files were read."""
    module: Any = Module(package)
    use_kept_table(module)
    first = module.create_import_structure_from_path(path or package / "models")
    second = module.create_import_structure_from_path(path or package / "models" / "__init__.py")
    assert first == second and first is not second and list(first) == list(second)
    return first, module.calls


def test_the_table_is_read_once_for_an_installation(package: Path) -> None:
    table, calls = read(package)
    assert calls == 1 and list(table) == ["b", frozenset({"torch"}), "a"]
    assert table == Module(package)._read("models") == decoded(json.loads(json.dumps(encoded(table))))
    assert read(package) == (table, 0)
    assert read(package, package / "models" / "clip")[1] == 2, "other folders are read"
    (package.parent / "transformers-9.9.dist-info" / "RECORD").write_text("two files", encoding="utf-8")
    assert read(package) == (table, 1), "it was installed again"


def test_processes_that_start_together_read_it_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Module, path: str) -> dict[Any, Any]:
        time.sleep(0.3)
        return now(self, path)

    now = Module._read
    monkeypatch.setattr(Module, "_read", slow)
    with ThreadPoolExecutor(4) as together:
        found = list(together.map(lambda _: read(package), range(4)))
    assert sorted(calls for _, calls in found) == [0, 0, 0, 1] and all(table == found[0][0] for table, _ in found)


def test_a_process_does_not_wait_for_another_one_that_hangs(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_table, "WAIT_S", 0.1)
    kept = path_of(package)
    assert kept is not None
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(kept.with_suffix(".lock")):
        assert read(package)[1] == 1


def test_a_folder_without_locks_is_no_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock 3.18 raises this error there."""

    def acquire(self: FileLock) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "_acquire", acquire)
    assert [read(package)[1], read(package)[1]] == [1, 0]


@pytest.mark.parametrize("damage", [b"", b"[", b"{}", b"[1]"])
def test_a_damaged_file_is_read_and_written_again(package: Path, damage: bytes) -> None:
    table, _ = read(package)
    kept = path_of(package)
    assert kept is not None
    kept.write_bytes(damage)
    assert read(package) == (table, 1)
    kept.write_bytes(kept.read_bytes().replace(b'"C"', b'"D"'))
    assert read(package) == (table, 1), "its checksum differs"
    assert read(package) == (table, 0)


def test_nothing_is_kept_of_files_that_may_change(package: Path) -> None:
    (package.parent / "transformers-9.9.dist-info" / "RECORD").unlink()
    assert read(package)[1] == read(package)[1] == 1 and path_of(package) is None


EACH_FIRST = """
import ast, importlib, os, pathlib, sys
import transformers.models.auto, accelerate, diffusers
from transformers import BloomPreTrainedModel
from lora_rocm.processes import lazy_packages
lazy_packages.install()
for package in lazy_packages.PACKAGES:
    tree = ast.parse(pathlib.Path(sys.argv[1], *package.split("."), "__init__.py").read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    for name in {alias.asname or alias.name for node in imported for alias in node.names}:
        if (child := os.fork()) == 0:
            getattr(importlib.import_module(package), name)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(package, name)
print("all")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name in a process of its own")
def test_each_name_can_be_the_first_to_be_imported(home: Path) -> None:
    """The packages have circular imports, which work in some orders only."""
    env = {**os.environ, "LORA_ROCM_HOME": str(home)}
    command = [sys.executable, "-c", EACH_FIRST, sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1200)
    assert done.stdout == "all\n", done.stderr[-2000:]
