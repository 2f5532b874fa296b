"""The launches of a step are listed without a GPU, and the model is unchanged afterwards."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from lora_rocm.checks.kernel_processes import unproven_cases  # noqa: E402
from lora_rocm.errors import DataError, ModelError  # noqa: E402
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for  # noqa: E402
from lora_rocm.kernels.backend import kernels_seen, launches, launching_on_meta  # noqa: E402
from lora_rocm.memory import count_child, step_launches  # noqa: E402
from lora_rocm.memory.footprint import count, largest_of, meta_model  # noqa: E402
from lora_rocm.memory.step_launches import launches_of_step  # noqa: E402
from lora_rocm.processes.start_jobs import CountJob, StepLaunches  # noqa: E402
from lora_rocm.recipe.kinds import recipe_from  # noqa: E402
from lora_rocm.recipe.schema import Recipe  # noqa: E402

BF16 = torch.bfloat16
Step = tuple[ModelFamily, LoadedModel, Recipe]


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """The smallest family with kernels in its step."""
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    recipe = recipe_from(
        {
            "model": {"family": "causal-lm", "name_or_path": "builtin:tiny-llama"},
            "data": {"sources": [{"dataset": "builtin:demo-chats"}], "max_length": 64},
            "lora": {"rank": 4, "targets": "all-linear"},
            "train": {"max_train_steps": 1, "batch_size": 2},
        }
    )
    family = family_for(recipe)
    return family, meta_model(family, recipe, BF16), recipe


def test_a_step_s_kernels_are_listed(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_of_step(*step)
    assert found.launches and unproven_cases(found.kernels, BF16)
    assert json.dumps([launch.arguments for launch in found.launches])
    monkeypatch.setattr(step_launches, "launching_on_meta", nullcontext)
    assert not launches_of_step(*step).launches, "the control: otherwise a pass on meta launches nothing"


def test_shapes_that_are_known_already_do_not_change_the_list(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_of_step(*step)
    monkeypatch.setattr(step_launches, "ReusedShapes", nullcontext)
    assert launches_of_step(*step) == found


def test_the_memory_of_a_listed_model_is_the_same(step: Step) -> None:
    family, model, recipe = step
    wanted = count(family, meta_model(family, recipe, BF16), recipe, largest_of(recipe))
    launches_of_step(family, model, recipe)
    parameters = [each for component in model.components.values() for each in component.parameters()]
    assert any(each.requires_grad for each in parameters) and not any(each.grad is not None for each in parameters)
    assert count(family, model, recipe, largest_of(recipe)) == wanted


@pytest.mark.parametrize(
    "error", [DataError("none", "", where="", fix=""), ModelError("base", "", where="", fix=""), TypeError("argument")]
)
def test_a_step_that_fails_lists_nothing(error: Exception, step: Step, capfd: pytest.CaptureFixture[str]) -> None:
    """The process still counts the memory, or has the same error there."""
    with mock.patch.object(count_child, "launches_of_step", side_effect=error):
        assert count_child._launches(*step) == StepLaunches([], [])
    text = capfd.readouterr().err
    assert type(error).__name__ in text and "Traceback" not in text
    assert count_child._launches(*step).launches


def test_a_base_that_is_refused_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process is asked before the base is checked. The check has the same error, and its traceback is enough."""
    monkeypatch.setattr(count_child, "job_of", lambda *kinds: CountJob(Path("a recipe.yaml")))
    for error, code in (
        (ModelError("refused", "", where="", fix=""), ModelError.exit_code),
        (RuntimeError("sizes\ndiffer"), 1),
    ):
        monkeypatch.setattr(count_child, "load_recipe", mock.Mock(side_effect=error))
        assert count_child.main() == code
        text = capsys.readouterr().err
        assert type(error).__name__ in text and "Traceback" not in text and text.count("\n") == 1
    monkeypatch.setattr(count_child, "load_recipe", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):  # the control: a fault that no base causes
        count_child.main()


def test_kernels_are_launched_on_meta_only_where_asked() -> None:
    on_meta, on_cpu = torch.empty(2, device="meta"), torch.empty(2)
    with kernels_seen() as names:
        assert not launches("triton", on_meta, lambda: "a kernel") and names == {"a kernel"}
        assert launches("triton", on_cpu, lambda: "a kernel")
        with pytest.raises(ZeroDivisionError), launching_on_meta():
            assert launches("triton", on_meta, lambda: "another") and "another" in names
            assert not launches("eager", on_meta, lambda: "plain")
            raise ZeroDivisionError
    assert not launches("triton", on_meta, lambda: "a kernel"), "also after an error"
