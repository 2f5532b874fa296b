"""The packaged configs can compute. So a start does not check a base with the same values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lora_rocm import families
from lora_rocm.checks.attention_routes import SHAPES
from lora_rocm.families.base import family_for
from lora_rocm.train import dry_run
from tests.tiny_models import tiny_recipe

BASES = (
    *({"family": name} for name in ("sdxl", "sd15", "sd2", "anima")),
    *({"family": "flux", "variant": variant} for variant in ("dev", "schnell")),
    {"family": "z-image"},
)
"""Every folder of packaged configs. Further variants have the same ones."""
FAMILIES_FOLDER = Path(families.__file__).parent
UNET, CLIP, SCHEDULER = "unet/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json"


@pytest.fixture(autouse=True)
def checks_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a base with random weights is accepted, as its configs are always packaged."""
    monkeypatch.setattr(dry_run, "RandomSource", Path)
    monkeypatch.setattr(dry_run, "VERDICTS", {})


class Widths(TorchFunctionMode):
    """Collects the widths of the heads of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found.add((args[0] if args else kwargs["query"]).shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", BASES, ids=lambda model: " ".join(model.values()))
def test_packaged_configs_compute(model: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A family may name the widths of its heads for the test of attention: the widths of this base."""
    monkeypatch.setattr(dry_run, "_is_as_packaged", lambda source: False)
    recipe = tiny_recipe("random:", model=model)
    computed, losses = list[object](), dry_run.losses

    def count(*args: Any) -> object:
        computed.append(args)
        return losses(*args)

    monkeypatch.setattr(dry_run, "losses", count)
    with Widths() as widths:
        dry_run.require_computable(family_for(recipe), recipe)
    assert len(computed) == 1 and widths.found
    if recipe.spec.head_widths != tuple(SHAPES):
        assert widths.found - {512} == set(recipe.spec.head_widths), "the VAE's only head is wider"


def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let nothing be computed; return a list with an entry for each component that a start would compute with."""
    found = list[object]()
    monkeypatch.setattr(dry_run, "_try", lambda source, run: found.append(run))
    return found


@pytest.fixture
def computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], bool]:
    """Returns a function that changes values of a packaged config, and returns whether a start checks the base."""
    computed = tried(monkeypatch)

    def found(file: str, values: dict[str, Any]) -> bool:
        packaged = family_for(tiny_recipe("random:")).source.layout.configs  # type: ignore[attr-defined]
        folder = Path(shutil.copytree(packaged, tmp_path / str(len(list(tmp_path.iterdir())))))
        config = json.loads((folder / file).read_text(encoding="utf-8")) | values
        config = {key: value for key, value in config.items() if value != "missing"}
        (folder / file).write_text(json.dumps(config), encoding="utf-8")
        recipe = tiny_recipe(f"random:{folder}")
        computed.clear()
        dry_run.require_computable(family_for(recipe), recipe)
        return bool(computed)

    return found


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (UNET, {}),
        (UNET, {"_diffusers_version": "0.19.0", "_name_or_path": "x"}),
        (UNET, {"dropout": 0.0}),  # the library's default
        (CLIP, {"architectures": ["Other"], "torch_dtype": "float16", "transformers_version": "4.1"}),
        (CLIP, {"attention_dropout": "missing"}),
        (SCHEDULER, {"clip_sample": False, "skip_prk_steps": True, "rescale_betas_zero_snr": None}),
    ],
)
def test_the_same_values_are_accepted(
    file: str, values: dict[str, Any], computes: Callable[[str, dict[str, Any]], bool]
) -> None:
    assert not computes(file, values)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (UNET, {"norm_eps": 1e-6}),
        (UNET, {"layers_per_block": [2, 2, 2]}),
        (UNET, {"norm_eps": "missing", "flip_sin_to_cos": 1}),  # true, in JSON
        (UNET, {"something_new": 1}),
        (UNET, {"freq_shift": "text"}),
        (CLIP, {"hidden_act": "gelu"}),
        (SCHEDULER, {"prediction_type": "v_prediction"}),
        (SCHEDULER, {"trained_betas": [0.1, 0.2]}),
    ],
)
def test_other_values_are_computed_with(
    file: str, values: dict[str, Any], computes: Callable[[str, dict[str, Any]], bool]
) -> None:
    assert computes(file, values)


def test_a_language_model_has_no_packaged_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of its configs is its own."""
    recipe = tiny_recipe("builtin:tiny-llama", model={"family": "causal-lm"})
    computed = tried(monkeypatch)
    dry_run.require_computable(family_for(recipe), recipe)
    assert len(computed) == 1


def test_every_folder_of_packaged_configs_is_computed_with() -> None:
    recipes = [tiny_recipe("random:", model=model) for model in BASES]
    folders = {family_for(recipe).source.layout.configs for recipe in recipes}  # type: ignore[attr-defined]
    assert folders == {found.parents[1] for found in FAMILIES_FOLDER.glob("*/config*/vae/config.json")}
