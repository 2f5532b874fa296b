"""Users get the same weights by every route: its own files, and all conversions of a checkpoint afterwards."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_rocm
from lora_rocm.children import conversions, model_child
from lora_rocm.errors import ResumeError
from lora_rocm.export.verify import Verification
from lora_rocm.families.registry import FAMILIES
from lora_rocm.optim import schedule_free
from lora_rocm.optim.registry import RULES, rule_of
from lora_rocm.optim.update_rule import UpdateRule, shown_weights
from lora_rocm.processes.jobs import ExportJob
from lora_rocm.recipe.optim_sections import OPTIMIZERS, AdamwSection, ScheduleFreeSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import checkpoint
from tests.export.test_gguf import script_of
from tests.families.contract import Its
from tests.train.runs import make_recipe, material, start

__all__ = ["material"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
STEPS = 3
SAVED_AT = 2
"""An earlier update with a checkpoint."""
LORA: dict[str, Any] = {"rank": 2, "targets": r"down_blocks\.1.*attentions\.0.*attn1\.to_[qv]"}
AVERAGING = tuple(name for name, section in OPTIMIZERS.items() if section.averages)
RATES = {"prodigy": 1.0, "dadapt_adam": 1.0, "prodigy_schedule_free": 1.0}
D0 = {"d0": 1e-2}
"""Larger than usual, so that three updates make a difference."""


def optim(name: str) -> dict[str, Any]:
    rate = {"learning_rate": RATES.get(name, 1e-2)}
    return {
        "optimizer": name,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        **rate,
        **(D0 if name in RATES else {}),
    }


def recipe_of(material: Path, sections: dict[str, dict[str, Any]]) -> Recipe:
    train = {"max_train_steps": STEPS, "batch_size": 1, "gradient_accumulation_steps": 1}
    base: dict[str, dict[str, Any]] = {
        "lora": LORA,
        "optim": optim("adamw"),
        "train": train,
        "output": {"save_every_n_steps": SAVED_AT},
    }
    return make_recipe(material, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


def export(run_dir: RunDir, form: str, output: Path, updates: int | None = None, converter: Path | None = None) -> Path:
    job = ExportJob(source=run_dir.path, format=form, output=output, updates=updates, converter=converter)
    model_child.export_run(replace(job, spare_cache=run_dir.path.parent / "spare"))
    return output


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of all files of a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversions, model_child):
        monkeypatch.setattr(module, "emit", lambda event: None)


def assert_same_by_every_way(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch) -> RunDir:
    """Train; then export each format of the end again, and the LoRA file of the checkpoint before it."""
    run_dir = RunDir(folder / "run")
    assert start(recipe, run_dir.path)
    for form in recipe.formats:
        made = export(run_dir, form, folder / "again" / run_dir.export_of(form).name)
        assert contents(made) == contents(run_dir.export_of(form)) != {}, form
    if "kohya" not in recipe.spec.formats:  # the format of such files, for which such a family has no reader
        patch.setattr(model_child.writers, "verify", lambda *about: Verification(0.0, 0.0, (), ()))
    earlier = export(run_dir, "kohya", folder / "earlier.safetensors", SAVED_AT)
    assert contents(earlier) == contents(run_dir.checkpoint_lora(SAVED_AT)), "beside the checkpoint"
    # Controls: another step is another file, and so are the trained weights if an average is kept
    assert contents(earlier) != contents(run_dir.checkpoint_lora(STEPS))
    with patch.context() as faulty:
        faulty.setattr(checkpoint, "shown_weights", lambda rule, section, trained, ema, state: trained)
        wrong = export(run_dir, "kohya", folder / "wrong.safetensors")
    averages = recipe.optim.averages or bool(recipe.train.ema_decay)
    assert (contents(wrong) != contents(run_dir.checkpoint_lora(STEPS))) == averages
    return run_dir


CASES: dict[str, dict[str, dict[str, Any]]] = {
    **{
        name: {"optim": optim(name), "lora": {"weight_dtype": section.weight_dtypes[0]}}
        for name, section in OPTIMIZERS.items()
    },
    **{
        f"{name}, bf16": {"optim": optim(name), "lora": {"weight_dtype": "bf16"}}
        for name in AVERAGING
        if "bf16" in OPTIMIZERS[name].weight_dtypes
    },
    "EMA": {"train": {"ema_decay": 0.5}},
    "EMA, bf16": {"train": {"ema_decay": 0.5}, "lora": {"weight_dtype": "bf16"}},
    "EMA, pissa": {"train": {"ema_decay": 0.5}, "lora": {"init": "pissa"}},
    "averaging, pissa": {"optim": optim(AVERAGING[0]), "lora": {"init": "pissa"}},
    "averaging, DoRA": {"optim": optim(AVERAGING[0]), "lora": {"use_dora": True}},
}
QUICK = (*AVERAGING, "EMA, bf16")


def test_every_optimizer_is_among_the_cases() -> None:
    assert RULES.keys() == OPTIMIZERS.keys() and RULES.keys() <= CASES.keys() and len(AVERAGING) >= 2
    for name, section in OPTIMIZERS.items():  # the section's flag matches the rule
        assert (RULES[name].averaged.__func__ is not UpdateRule.averaged.__func__) == section.averages  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_an_export_of_a_finished_run_is_the_file_of_the_run(
    case: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in fp32, which show the last bit."""
    output = {"dtype": "fp32", "formats": ["kohya", "peft"] if case in QUICK else list(FAMILIES["sdxl"].formats)}
    recipe = recipe_of(material, {**CASES[case], "output": output})
    assert_same_by_every_way(recipe, tmp_path, monkeypatch)


WAYS = ("averaging", "EMA")


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("causal-lm", "averaging"),
        *(pytest.param(name, way, marks=pytest.mark.slow) for name in FAMILIES.names for way in WAYS),
    ],
)
def test_so_it_is_of_every_family_in_every_format(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = Its.write(family, tmp_path / "its")
    recipe = averaging(its.recipe, way)
    run_dir = assert_same_by_every_way(recipe, tmp_path, monkeypatch)
    if "gguf" in recipe.spec.conversions:
        assert_conversions(its, recipe, run_dir, tmp_path)


def averaging(recipe: Recipe, way: str) -> Recipe:
    """The recipe with an average, in all formats, with a checkpoint before the last update."""
    formats = tuple(form for form in recipe.spec.formats if form in recipe.lora.writable_formats)
    output = recipe.output.model_copy(
        update={"formats": formats, "dtype": "fp32", "save_every_n_steps": SAVED_AT, "keep_last": 2}
    )
    train = {"max_train_steps": STEPS, "ema_decay": 0.5 if way == "EMA" else 0.0}
    rule = AVERAGING[0] if way == "averaging" else "adamw"
    changed: dict[str, Any] = {
        "optim": OPTIMIZERS[rule](**optim(rule)),
        "train": recipe.train.model_copy(update=train),
        "sample": recipe.sample.only(()),
        "output": output,
    }
    return recipe.model_copy(update=changed)


def assert_conversions(its: Its, recipe: Recipe, run_dir: RunDir, folder: Path) -> None:
    """The converter of gguf is handed the run's own PEFT folder; merged is the base with that folder's additions."""
    own = load_file(run_dir.peft_dir / "model" / "adapter_model.safetensors")
    script = script_of(folder / "llama", len(own))
    copied = folder / "seen.safetensors"
    text = f"(asked.lora_path / 'adapter_model.safetensors').read_bytes()\nPath({str(copied)!r}).write_bytes(raw)\n"
    script.write_text(script.read_text(encoding="utf-8").replace(text.splitlines()[0].replace("'", '"'), text, 1))
    export(run_dir, "gguf", folder / "lora.gguf", converter=script)
    assert copied.read_bytes() == (run_dir.peft_dir / "model" / "adapter_model.safetensors").read_bytes()
    base = load_file(its.folder / "base" / "model.safetensors")
    merged = load_file(export(run_dir, "merged", folder / "merged") / "model.safetensors")
    config = json.loads((run_dir.peft_dir / "model" / "adapter_config.json").read_text(encoding="utf-8"))
    downs = [name for name in own if name.endswith("lora_A.weight")]
    for down in downs:
        weight = f"{down.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
        change = own[down.replace("lora_A", "lora_B")] @ own[down] * (config["lora_alpha"] / config["r"])
        assert change.norm() > 100 * BOUND * base[weight].norm()  # a wrong one would be seen
        assert (merged[weight] - base[weight] - change).norm() <= BOUND * base[weight].norm(), weight
    assert downs


BOUND = 1e-6
"""Of a sum in fp32, as a share."""


def test_an_average_is_the_same_in_every_layout() -> None:
    """Of one flat tensor or of a weight at a time, with a remainder of any length; ``lerp`` is the control."""
    generator = torch.Generator().manual_seed(3)
    flat_N, end_N = (torch.randn(997, generator=generator) for _ in range(2))
    section, rule = ScheduleFreeSection(), schedule_free.ScheduleFree
    whole_N = rule.averaged(section, "w", flat_N, {"w.z": end_N})
    for first, last in pairwise([0, 1, 4, 11, 64, 997]):
        piece = rule.averaged(section, "w", flat_N[first:last].clone(), {"w.z": end_N[first:last].clone()})
        assert torch.equal(piece, whole_N[first:last])
    exact_N = flat_N.double() + (end_N.double() - flat_N.double()) * (1 - 1 / section.betas[0])
    torch.testing.assert_close(whole_N.double(), exact_N, rtol=1e-6, atol=1e-6)


def test_state_of_another_optimizer_is_refused() -> None:
    section, weight = ScheduleFreeSection(), {"w": torch.zeros(2)}
    with pytest.raises(ResumeError) as caught:
        shown_weights(rule_of(section), section, weight, {}, lambda: {"w.exp_avg": torch.zeros(2)})
    assert caught.value.code == "resume-optimizer-changed" and "w.z" in caught.value.where
    plain = AdamwSection()
    assert shown_weights(rule_of(plain), plain, weight, {}, lambda: pytest.fail("not read")) is weight


RAW = {
    "part_to_resume": {"train/checkpoint.py", "train/load_model.py", "train/resume.py"},
    "averaged": {"optim/schedule_free.py", "optim/update_rule.py"},
    "FILE_OF": {"rundir/layout.py", "rundir/checkpoint_record.py", "train/checkpoint.py"},
}
"""Names that do not lead to the weights that users get: name -> the modules that may use it, to train on or to check
files.
"""


def users_of(names: set[str], sources: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, module) of every use."""
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)) if any(name in source for name in names) else ():
            for field in ("id", "attr", "name"):
                if (found := getattr(node, field, None)) in names:
                    yield found, module


def test_nobody_else_reads_weights_of_a_checkpoint() -> None:
    root = Path(lora_rocm.__file__).parent
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    assert {(name, module) for name, modules in RAW.items() for module in modules} == set(users_of(set(RAW), sources))
    planted = {"train/other.py": "adapter.load(checkpoint.part_to_resume('ema') or x)"}
    assert list(users_of(set(RAW), planted)) == [("part_to_resume", "train/other.py")]
