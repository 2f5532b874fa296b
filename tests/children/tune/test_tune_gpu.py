"""Trials on a GPU: real kernels, a package in torch's place inside captured passes, and TunableOp's own table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.device.backend_settings import use_table
from lora_rocm.errors import MachineError
from lora_rocm.foundation.safe_path import python_command
from tests.wording import says

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROOT = Path(__file__).parents[3]
PACKAGE = """import torch.nn.functional as F
def flash_attn_func(q, k, v, causal=False, softmax_scale=None):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2){spoilt}
"""
SETS = ("train.max_train_steps=6", "output.save_every_n_steps=3", "sample.prompts=[]", "sample.control_prompts=[]")


def lora_rocm(folder: Path, *arguments: str, **sets: str) -> subprocess.CompletedProcess[str]:
    changes = [
        *SETS,
        f"cache.dir={folder / 'cache'}",
        *(f"{key.replace('__', '.')}={value}" for key, value in sets.items()),
    ]
    command = python_command("-m", "lora_rocm", *arguments, *(word for one in changes for word in ("--set", one)))
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "LORA_ROCM_HOME": str(folder / "home")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def train(folder: Path, name: str, **sets: str) -> tuple[subprocess.CompletedProcess[str], list[float]]:
    run = folder / name
    done = lora_rocm(folder, "train", "demo.yaml", "--run-dir", str(run), "--resume", "latest", **sets)
    file = run / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return done, [event["loss"] for event in events if event["type"] == "step"]


def package(folder: Path, spoilt: str = "") -> None:
    (folder / "flash_attn.py").write_text(PACKAGE.format(spoilt=spoilt), encoding="utf-8")


def test_a_run_measures_uses_and_keeps_its_attention(tmp_path: Path) -> None:
    plain, losses = train(tmp_path, "safe")
    assert plain.returncode == 0 and not (tmp_path / "safe" / "tuned.json").exists(), plain.stderr
    package(tmp_path)
    done, found = train(tmp_path, "flash", runtime__attention="flash", runtime__profile="fast")
    assert done.returncode == 0 and "Attention: flash" in done.stdout, done.stdout + done.stderr
    assert found == pytest.approx(losses, rel=0.02)
    settings = json.loads((tmp_path / "flash" / "environment.json").read_text())["settings"]
    assert any(row["variable"] == "setting:attention" and row["value"] == '"flash"' for row in settings)


def test_a_wrong_package_is_refused(tmp_path: Path) -> None:
    package(tmp_path, " * 1.1")
    done, _ = train(tmp_path, "wrong", runtime__attention="flash")
    assert done.returncode == 2 and "wrong: output" in done.stderr, done.stdout + done.stderr


def test_a_table_is_tuned_read_by_a_run_and_refused_for_other_software(tmp_path: Path) -> None:
    done = lora_rocm(tmp_path, "tune", "demo.yaml", runtime__profile="fast")
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = (tmp_path / "home").glob("products-*.csv")
    text = table.read_text()
    assert "Validator,PT_VERSION" in text and "GemmTunableOp" in text
    done, _ = train(tmp_path, "tuned", runtime__profile="fast")
    assert done.returncode == 0 and (tmp_path / "tuned" / "products.csv").read_text() == text, done.stderr
    other = tmp_path / "other.csv"
    other.write_text(text.replace("Validator,PT_VERSION,", "Validator,PT_VERSION,9"))
    command = python_command("-c", f"from {use_table.__module__} import use_table; use_table({str(other)!r})")
    refused = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (
        refused.returncode
        and MachineError.__name__ in refused.stderr
        and says(refused.stderr, "children/refuses-this-table")
    )


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's warning where a backward pass comes first
def test_every_way_here_is_right_or_told(capfd: Any) -> None:
    from lora_rocm.children.tune.attention import Trial, prepared
    from lora_rocm.children.tune.job import AttentionCall
    from lora_rocm.device.attention import context_of

    calls = [AttentionCall(2, 4, 300, keys, 64, False) for keys in (300, 77)]
    trials = [Trial.of(call, 1, torch.device("cuda"), torch.bfloat16) for call in calls]
    for way in ("sdpa", "sdpa-flash", "sdpa-efficient", "math", "math-groups", "math-groups-float32"):
        assert prepared(way, context_of(way), trials, True, {})() > 0, way
