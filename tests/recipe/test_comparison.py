"""Which values a resume may change, and which all ranks have to share."""

from pathlib import Path

import pytest

from lora_rocm.recipe import comparison
from lora_rocm.recipe.comparison import fingerprint, resume_differences, shared_values
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
    off = ("sample.prompts=[]", "data.validation_split=0")  # beside which their settings may stand
    old, new = (shared_values(load_recipe("recipe.yaml", [*off, *sets]).recipe) for sets in ((), (override,)))
    assert [key for key in old if old[key] != new[key]] == ([override.partition("=")[0]] if shared else [])


def test_what_they_may_differ_in_are_keys_of_the_recipe_that_a_resume_may_change() -> None:
    recipe = load_recipe("recipe.yaml").recipe
    keys = {f"{section}.{key}" for section, values in recipe.model_dump().items() for key in values}
    assert keys >= comparison.OF_A_PROCESS and not comparison.OF_A_PROCESS & comparison.fixed_values(recipe).keys()
