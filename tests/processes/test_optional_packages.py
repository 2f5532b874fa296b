"""Packages that happen to be installed neither slow a start nor break it, and postponed imports work when needed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.processes.lazy_packages import install
from lora_rocm.processes.optional_packages import (
    DISTRIBUTIONS,
    HIDDEN,
    ON_CALL,
    WITH_CALLS,
    LateFunctions,
    LateMap,
    LateSciPy,
)

ROOT, SITE = Path(__file__).parents[2], Path(sysconfig.get_path("purelib"))
ASKING = (
    "transformers/utils/import_utils.py",
    "diffusers/utils/import_utils.py",
    "accelerate/utils/imports.py",
    "peft/import_utils.py",
)
"""Files in which the libraries ask whether a package is installed."""
ASKS = re.compile(r"""(?:is_package_available|find_spec)\(\s*["']([A-Za-z0-9_]+)["']""")
USED = {"pynvml", "amdsmi", "sentencepiece"}
"""Packages that torch imports itself to read sensors, and that transformers needs for some tokenizers."""
BROKEN = """
import os, pathlib
with pathlib.Path(os.environ["TOUCHED"]).open("a", encoding="utf-8") as file:
    file.write(__name__ + "\\n")
raise RuntimeError(f"{__name__} was built for another torch")
"""
STARTED = """
import importlib, json, sys
from lora_rocm.processes import lazy_packages
if sys.argv[2] == "installed":
    lazy_packages.install()
import lora_rocm.train.worker
from lora_rocm.train import pipeline
importlib.import_module(f"lora_rocm.families.{sys.argv[1]}.family")
import torch
from peft import LoraConfig, inject_adapter_in_model
inject_adapter_in_model(LoraConfig(target_modules=["0"]), torch.nn.Sequential(torch.nn.Linear(4, 4)))
print(json.dumps(sorted(name for name, module in sys.modules.items() if module is not None)))
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of broken packages: each that the libraries ask for, and that is not installed here."""
    folder = tmp_path_factory.mktemp("broken")
    asked = {name for file in ASKING for name in ASKS.findall((SITE / file).read_text(encoding="utf-8"))}
    assert {"scipy", "torchao", "torchvision", "torchaudio", "flash_attn", "sklearn"} <= asked
    for name in {*asked, *HIDDEN} - USED:
        if importlib.util.find_spec(name) is not None:
            continue
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(BROKEN, encoding="utf-8")
        metadata = folder / f"{name}-99.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n", encoding="utf-8")
        (metadata / "top_level.txt").write_text(name, encoding="utf-8")
        if name == "torch_npu":  # torch would load it
            (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:load", encoding="utf-8")
    return folder


def started(family: str, how: str, broken: Path, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A process after the imports of a worker of this family, and the broken packages that ran."""
    touched = tmp_path / "touched.txt"
    env = {**os.environ, "LORA_ROCM_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(broken)}
    done = subprocess.run(
        [sys.executable, "-c", STARTED, family, how],
        cwd=ROOT,
        env={**env, "TOUCHED": str(touched)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done, touched.read_text(encoding="utf-8").split() if touched.exists() else []


@pytest.mark.parametrize("family", ["sdxl", pytest.param("causal_lm", marks=pytest.mark.slow)])
def test_a_broken_package_that_no_run_uses_is_not_imported(family: str, broken: Path, tmp_path: Path) -> None:
    done, touched = started(family, "installed", broken, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert touched == []
    assert "peft.tuners.lora" in json.loads(done.stdout.splitlines()[-1])


def test_without_it_such_a_package_ends_the_start(broken: Path, tmp_path: Path) -> None:
    done, touched = started("causal_lm", "plain", broken, tmp_path)
    assert done.returncode != 0 and touched


def test_a_hidden_package_is_missing_as_if_it_were_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list(sys.meta_path)
    hidden = {name for name in HIDDEN if name not in sys.modules}
    try:
        install()
        assert hidden
        for name in hidden:
            assert importlib.util.find_spec(name) is None
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
            assert name not in sys.modules, "other libraries call a package whose name they find there"
        assert importlib.metadata.version("torch"), "finders still find distributions"
    finally:
        sys.meta_path[:] = kept


ASKED = """
import sys
from lora_rocm.processes import lazy_packages
lazy_packages.install()
import torch
from importlib.util import find_spec
from lora_rocm.device.attention import OTHERS
before = find_spec("flash_attn")
attend = OTHERS["flash"]()
q = torch.ones(1, 2, 3, 4, dtype=torch.bfloat16)
print([before is None, attend(q, q, q, False, 1.0).flatten()[0].item(), find_spec("xformers") is None])
"""


def test_a_package_that_a_recipe_asks_for_is_found(tmp_path: Path) -> None:
    """``runtime.attention: flash`` is the package flash-attn."""
    for name in ("flash_attn", "xformers"):
        (tmp_path / f"{name}.py").write_text(
            "def flash_attn_func(q, k, v, causal, softmax_scale):\n    return 7 * q\n", encoding="utf-8"
        )
    env = {**os.environ, "LORA_ROCM_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout == "[True, 7.0, True]\n", done.stderr[-2000:]


NAMED = re.compile(r"""(?:^\s*import |^\s*from |import_module\(["']|_library\(["'])(\w+)""", re.MULTILINE)


def test_the_program_imports_no_hidden_package_but_the_one_that_it_shows() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "lora_rocm").rglob("*.py")}
    found = {name for source in sources.values() for name in NAMED.findall(source)}
    assert {"torch", "aiter", "flash_attn"} <= found
    assert found & set(HIDDEN) == {"flash_attn"}


def test_a_package_that_was_imported_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("torchao")
    monkeypatch.setitem(sys.modules, "torchao", module)
    kept, before = list(sys.meta_path), set(sys.modules)
    try:
        install()
        assert sys.modules["torchao"] is module
    finally:
        sys.meta_path[:] = kept
        for name in set(sys.modules) - before:
            del sys.modules[name]


SCIPY = """
def ppf(q, a, b):
    return q ** (a / b)
beta = type("Beta", (), {"ppf": staticmethod(ppf)})
"""
DRAWN = """
import sys
from lora_rocm.processes import lazy_packages
if sys.argv[1] == "installed":
    lazy_packages.install()
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler, integrate
before = sorted(name for name in sys.modules if name.startswith("scipy"))
scheduler = DPMSolverMultistepScheduler(use_beta_sigmas=True)
scheduler.set_timesteps(5)
print([before, scheduler.sigmas.tolist(), integrate.quad(), LMSDiscreteScheduler.__module__])
"""


@pytest.mark.slow
def test_a_scheduler_imports_scipy_when_it_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    for name, content in {"__init__": "", "stats": SCIPY, "integrate": "def quad():\n    return 7\n"}.items():
        (folder / "scipy").mkdir(parents=True, exist_ok=True)
        (folder / "scipy" / f"{name}.py").write_text(content, encoding="utf-8")
    (folder / "scipy-99.0.dist-info").mkdir()
    (folder / "scipy-99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: scipy\nVersion: 99.0\n", encoding="utf-8"
    )
    env = {**os.environ, "LORA_ROCM_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)}
    found = []
    for how in ("plain", "installed"):
        done = subprocess.run(
            [sys.executable, "-c", DRAWN, how], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(ast.literal_eval(done.stdout.splitlines()[-1]))
    plain, late = found
    assert plain[1:] == late[1:] and len(late[1]) == 6 and late[2] == 7
    assert "scipy.stats" in plain[0] and late[0] == []


CALLED = """
import importlib, json, sys
from lora_rocm.processes import lazy_packages
if sys.argv[1] == "installed":
    lazy_packages.install()
import torch
from transformers.loss import loss_utils
listed = {name: function.__name__ for name, function in loss_utils.LOSS_MAPPING.items()}
before = "transformers.loss.loss_ctc" in sys.modules
logits, labels = torch.arange(12.0).view(1, 4, 3), torch.tensor([[0, 2, 1, -100]])
loss = loss_utils.LOSS_MAPPING["ForCausalLM"](logits, labels, vocab_size=3)
config = type("Config", (), {"pad_token_id": 0, "ctc_loss_reduction": "sum", "ctc_zero_infinity": False})
try:
    ctc = float(loss_utils.LOSS_MAPPING["ForCTC"](
        logits.log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), config))
except TypeError:
    ctc = "refused"
from diffusers.utils import import_utils
map = import_utils._package_map
print(json.dumps([listed, float(loss), ctc, sorted(map.get("safetensors") or []), len(map) > 20, before]))
"""


@pytest.mark.slow
def test_what_is_postponed_gives_the_same_when_it_is_needed(tmp_path: Path) -> None:
    answers: list[list[Any]] = []
    for how in ("plain", "installed"):
        env = {**os.environ, "LORA_ROCM_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-c", CALLED, how], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    plain, late = answers
    assert plain[:5] == late[:5] and plain[3] == ["safetensors"] and plain[4]
    assert (plain[5], late[5]) == (True, False), "the losses of other models are imported when they are called"


def test_the_modules_still_have_such_imports() -> None:
    for name in WITH_CALLS:
        tree = ast.parse(SITE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        made = ast.unparse(LateFunctions().visit(tree))
        replaced = re.findall(rf"^(\w+) = {ON_CALL}\('(\w+)', '(\w+)'\)$", made, re.MULTILINE)
        assert len(replaced) > 5
        for shown, submodule, function in replaced:
            file = SITE.joinpath(*name.split(".")[:-1], f"{submodule}.py")
            defined = [node.name for node in ast.parse(file.read_text("utf-8")).body if type(node) is ast.FunctionDef]
            assert shown == function and function in defined, "only a function may have a replacement"
    schedulers = sorted((SITE / "diffusers" / "schedulers").glob("scheduling_*.py"))
    sources = [ast.parse(file.read_text(encoding="utf-8")) for file in schedulers]
    assert sum("scipy" in ast.unparse(tree) for tree in sources) > 5
    for tree in sources:
        body = ast.unparse(LateSciPy().visit(tree))
        assert not re.search(r"^\s*(import|from) scipy", body, re.MULTILINE)
    for name in DISTRIBUTIONS:
        assert "packages_distributions()" in SITE.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8")


def test_distributions_are_looked_up_once_and_late() -> None:
    calls = list[int]()

    def read() -> Mapping[str, list[str]]:
        calls.append(1)
        return importlib.metadata.packages_distributions()

    late: Mapping[str, list[str]] = LateMap(read)
    assert not calls
    assert late["torch"] == ["torch"] and "torch" in late and "no-such" not in late and late.get("no-such") is None
    assert set(late) == set(importlib.metadata.packages_distributions()) and len(late) == len(list(iter(late)))
    assert calls == [1]


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    before = importlib.metadata.packages_distributions
    yield
    assert importlib.metadata.packages_distributions is before
