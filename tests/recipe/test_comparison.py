"""Which values a resume may change, and which all ranks have to share."""

from pathlib import Path

import pytest

from lora_rocm.recipe import comparison
from lora_rocm.recipe.comparison import LATER, fingerprint, resume_differences, shared_values
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe

MINIMAL = "model:\n  name_or_path: builtin:tiny-sdxl\ndata:\n  path: pics\ntrain:\n  max_train_steps: 10\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(MINIMAL, encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("train.max_train_steps=99", True),
        ("train.epochs=3", True),
        ("sample.prompts=[x]", True),
        ("runtime.threads=2", True),
        ("runtime.profile=fast", True),
        ("runtime.self_test=no", True),
        ("output.dir=elsewhere", True),
        ("lora.rank=3", False),
        ("train.seed=1", False),
        ("data.path=other", False),
        ("optim.betas=[0.9, 0.99]", False),
        ("model.vae=x", False),
    ],
)
def test_fingerprint_and_differences(override: str, same: bool) -> None:
    old, new = load_recipe("recipe.yaml").recipe, load_recipe("recipe.yaml", [override]).recipe
    assert (fingerprint(old) == fingerprint(new)) is same
    differences = resume_differences(old, new)
    assert [problem.where for problem in differences] == ([] if same else [override.partition("=")[0]])
    assert all(" -> " in problem.what for problem in differences)


@pytest.mark.parametrize(
    ("override", "shared"),
    [
        ("lora.rank=3", True),
        ("data.path=other", True),
        ("train.max_train_steps=99", True),
        ("train.validation_every_n_steps=9", True),
        ("sample.every_n_steps=9", True),
        ("sample.prompts=[x]", True),
        ("output.save_every_n_steps=9", True),
        ("output.formats=[peft]", True),
        ("runtime.canary_every_n_steps=9", True),
        ("runtime.deterministic=true", True),
        ("output.dir=elsewhere", False),
        ("cache.dir=elsewhere", False),
        ("runtime.threads=2", False),
        ("runtime.workers=2", False),
        ("runtime.pin_memory=no", False),
        ("runtime.memory=recompute", False),
        ("timeouts.step=9", False),
    ],
)
def test_what_processes_that_train_together_share(override: str, shared: bool) -> None:
    off = ("sample.prompts=[]", "data.validation_split=0")  # with these, all settings below are valid
    old, new = (shared_values(load_recipe("recipe.yaml", [*off, *sets]).recipe) for sets in ((), (override,)))
    assert [key for key in old if old[key] != new[key]] == ([override.partition("=")[0]] if shared else [])


def test_what_they_may_differ_in_are_keys_of_the_recipe_that_a_resume_may_change() -> None:
    recipe = load_recipe("recipe.yaml").recipe
    keys = {f"{section}.{key}" for section, values in recipe.model_dump().items() for key in values}
    assert keys >= comparison.OF_A_PROCESS and not comparison.OF_A_PROCESS & comparison.fixed_values(recipe).keys()


@pytest.mark.parametrize(
    ("family", "source", "recorded"),
    [
        ("sdxl", "path", "e81a80073ff56efc17e584cfae05d91b7f71bb12ece480898e8f530f2006b271"),
        ("causal-lm", "dataset", "f3c8ab85a9b1aa98acdf086200a4475f812a50298cd8bc9861a0bf3889e028bb"),
    ],
)
def test_a_key_that_is_added_later_changes_no_earlier_fingerprint(family: str, source: str, recorded: str) -> None:
    """Recorded on 2026-11-27: checkpoints have it, and could not be resumed. A new key gets a row in LATER."""
    sections = {
        "model": {"family": family, "name_or_path": "base"},
        "data": {"sources": [{source: "x"}]},
        "train": {"max_train_steps": 1},
        "cache": {"dir": "cache"},
        "output": {"dir": "runs"},
    }
    recipe = recipe_from(sections)
    assert fingerprint(recipe) == recorded
    slower = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"lr_warmup_from_zero": True})})
    assert "optim.lr_warmup_from_zero" in LATER and fingerprint(slower) != recorded, "the control"
    for key, value in ((key, value) for key, value in LATER.items() if key.startswith("data.")):
        changed = {key.removeprefix("data."): 5 if isinstance(value, int) else "other"}
        of_source = recipe.data.sources[0].model_copy(update=changed)
        for update in (changed, {"sources": (of_source,)}):
            other = recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})
            assert fingerprint(other) != recorded, "the control"
