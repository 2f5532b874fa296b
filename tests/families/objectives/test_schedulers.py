"""The scheduler that comes with a base: its class and its keys, against diffusers' own schedulers."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DDPMScheduler, SchedulerMixin

from lora_rocm.base_models.loading import builtin_folder
from lora_rocm.errors import ModelError
from lora_rocm.families.anima.family import Anima
from lora_rocm.families.common.latent_family import LatentFamily
from lora_rocm.families.flux.family import Flux
from lora_rocm.families.objectives.schedulers import BETA_KEYS, SchedulerKind, kind_named
from lora_rocm.families.sdxl.family import Sdxl
from lora_rocm.families.z_image.family import ZImage
from lora_rocm.model_files.models import index_of
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_models import read_json, tiny_recipe

DDPM, FLOW = kind_named("ddpm"), kind_named("flow")
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    """(class, its arguments with literal defaults), read from the sources: some classes need packages to import."""
    for file in sorted((Path(diffusers.__file__).parent / "schedulers").glob("scheduling_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Scheduler"):
                found = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                for made in found:
                    args, given = made.args.args[1:], made.args.defaults
                    defaults = [None] * (len(args) - len(given)) + [_literal(each) for each in given]
                    yield node.name, {arg.arg: value for arg, value in zip(args, defaults, strict=True)}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


ARGUMENTS = dict(arguments())


@pytest.mark.parametrize("kind", [DDPM, FLOW], ids=lambda kind: kind.name)
def test_every_argument_of_a_listed_class_is_used_refused_or_of_sampling(kind: SchedulerKind) -> None:
    fixed = [row.key for row in kind.fixed]
    listed = [*kind.used, *kind.sampling, *fixed]
    assert len(listed) == len(set(listed))
    taken = {key for row in kind.classes for key in ARGUMENTS[row.name]}
    assert taken <= set(listed) and {*kind.used, *kind.sampling} <= taken
    for row in kind.classes:
        odd = [each.key for each in kind.fixed if not each.allows(ARGUMENTS[row.name].get(each.key))]
        assert not odd, f"the defaults of {row.name} are refused"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_class_is_listed_if_and_only_if_its_betas_are_those_of_ddpm() -> None:
    wanted = DDPMScheduler(**BETAS).alphas_cumprod
    with_betas = {name: keys for name, keys in ARGUMENTS.items() if {*BETA_KEYS, "trained_betas"} <= keys.keys()}
    equal = set()
    for name in with_betas:
        cls = getattr(diffusers, name, None) or getattr(diffusers.schedulers, name)
        made = cls(**BETAS) if isinstance(cls, type) and issubclass(cls, SchedulerMixin) else None  # scipy is missing
        if made is None or torch.allclose(made.alphas_cumprod.to(wanted), wanted, rtol=1e-5, atol=0):
            equal.add(name)
    assert {row.name for row in DDPM.classes} == equal
    for row in DDPM.classes:
        assert {key: getattr(row, key) for key in BETA_KEYS} == {key: with_betas[row.name][key] for key in BETA_KEYS}


def test_the_flow_classes_shift_alike() -> None:
    for row in FLOW.classes:
        made = [getattr(diffusers, name)(shift=3.0) for name in (row.name, "FlowMatchEulerDiscreteScheduler")]
        assert torch.allclose(made[0].sigmas[:1000].flip(0)[:3], made[1].sigmas[:1000].flip(0)[:3])
        assert inspect.signature(type(made[0]).__init__).parameters["shift"].default == 1.0


FAMILIES: dict[str, type[LatentFamily]] = {"sdxl": Sdxl, "z-image": ZImage, "flux": Flux, "anima": Anima}


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "scheduler" / "scheduler_config.json"
    config = {**read_json(path), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "left out"}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny folder of each family with a scheduler to try. Tests change copies."""
    folder = tmp_path_factory.mktemp("bases")
    shipped = {"sdxl": builtin_folder("builtin:tiny-sdxl"), "z-image": builtin_folder("builtin:tiny-z-image")}
    return {**shipped, "flux": write_tiny_flux(folder / "flux"), "anima": write_tiny_anima(folder / "anima")}


def copied(bases: dict[str, Path], name: str, tmp_path: Path, index: str | None = None, **changes: Any) -> Path:
    """A copy of a base with changes of its scheduler config, and another class in its index."""
    folder = Path(shutil.copytree(bases[name], tmp_path / "m"))
    if index is not None:
        path = index_of(folder)
        assert path is not None
        path.write_text(json.dumps({**read_json(path), "scheduler": ["diffusers", index]}), encoding="utf-8")
    return edited(folder, **changes)


def family(name: str, folder: Path, **model: Any) -> Any:
    return FAMILIES[name](tiny_recipe(folder, model={"family": name, **model}))


def refused(name: str, folder: Path, **model: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _ = family(name, folder, **model).source
    return caught.value


OTHER_NOISE = ["EDMDPMSolverMultistepScheduler", "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler", "MyScheduler"]


@pytest.mark.parametrize("kind", [*OTHER_NOISE, 7, ["x"], "\x1b[31m"])
@pytest.mark.parametrize("place", ["config", "index"])
def test_a_scheduler_with_other_noise_is_refused_by_name(
    bases: dict[str, Path], tmp_path: Path, kind: Any, place: str
) -> None:
    """diffusers loads the class of the index, regardless of the config's class."""
    changes = {"_class_name": kind} if place == "config" else {"index": kind}
    error = refused("sdxl", copied(bases, "sdxl", tmp_path, **changes))
    assert error.code == "scheduler-unsupported" and str(kind).strip("\x1b") in error.what
    assert error.where.endswith("_class_name" if place == "config" else "model_index.json: scheduler")
    assert "\x1b" not in str(error)


def test_playground_as_it_is_published_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    published = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "sigma_schedule": "karras", "rho": 7.0}
    folder = copied(bases, "sdxl", tmp_path, "EDMDPMSolverMultistepScheduler")
    config = {"_class_name": "EDMDPMSolverMultistepScheduler", **published, "num_train_timesteps": 1000}
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert refused("sdxl", folder).code == "scheduler-unsupported"
    path.write_text(json.dumps({**config, "_class_name": "EulerDiscreteScheduler"}), encoding="utf-8")
    assert refused("sdxl", folder).code == "scheduler-unsupported"  # the index names it still


@pytest.mark.parametrize("name", ["z-image", "flux", "anima"])
@pytest.mark.parametrize("kind", ["EulerDiscreteScheduler", "DDPMScheduler", "UniPCMultistepScheduler"])
def test_a_flow_base_with_another_scheduler_is_refused(
    bases: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    assert refused(name, copied(bases, name, tmp_path, _class_name=kind)).code == "scheduler-unsupported"


@pytest.mark.parametrize(("name", "key", "value", "code"), [
    ("sdxl", "timestep_type", "continuous", "scheduler-unsupported"),
    ("sdxl", "use_flow_sigmas", True, "scheduler-unsupported"),
    ("sdxl", "use_dynamic_shifting", True, "scheduler-unsupported"),
    ("sdxl", "flow_shift", 3.0, "scheduler-unsupported"),
    ("sdxl", "shift", 3.0, "scheduler-unsupported"),
    ("sdxl", "shift", True, "scheduler-unsupported"),
    ("sdxl", "snr_shift_scale", 1.0, "scheduler-unsupported"),
    ("sdxl", "sigma_data", 0.5, "scheduler-unsupported"),
    ("sdxl", "variance_type", "learned_range", "scheduler-unsupported"),
    ("sdxl", "rescale_betas_zero_snr", "false", "scheduler-unreadable"),
    ("sdxl", "trained_betas", [0.01] * 10, "scheduler-unreadable"),
    ("z-image", "num_train_timesteps", 500, "scheduler-unsupported"),
    ("z-image", "time_shift_type", "linear", "scheduler-unsupported"),
    ("z-image", "shift_terminal", 0.02, "scheduler-unsupported"),
    ("z-image", "invert_sigmas", True, "scheduler-unsupported"),
    ("z-image", "prediction_type", "epsilon", "scheduler-unsupported"),
    ("z-image", "shift", 0, "scheduler-unreadable"),
    ("z-image", "shift", "3", "scheduler-unreadable"),
    ("z-image", "shift", float("nan"), "config-unreadable"),
    ("z-image", "use_dynamic_shifting", 1, "scheduler-unreadable"),
    ("z-image", "base_shift", 0, "scheduler-unreadable"),
    ("z-image", "base_image_seq_len", 4096, "scheduler-unreadable"),
    ("z-image", "base_image_seq_len", 4095, "scheduler-unreadable"),
])  # fmt: skip
def test_a_key_that_means_other_noise_is_refused_at_its_place(
    bases: dict[str, Path], tmp_path: Path, name: str, key: str, value: object, code: str
) -> None:
    error = refused(name, copied(bases, name, tmp_path, **{key: value}))
    assert error.code == code and "scheduler_config.json" in error.where


def test_missing_betas_are_those_of_the_class_and_said(bases: dict[str, Path], tmp_path: Path) -> None:
    without = {**dict.fromkeys(BETA_KEYS, "left out"), "_class_name": "LCMScheduler"}
    found = family("sdxl", copied(bases, "sdxl", tmp_path, "LCMScheduler", **without))
    (notice,) = found.notices
    assert "beta_schedule: scaled_linear" in notice
    wanted = diffusers.LCMScheduler().alphas_cumprod
    torch.testing.assert_close(found.objective.schedule.alphas_cumprod_T, wanted, rtol=1e-6, atol=0)
    own = family("sdxl", edited(tmp_path / "m", trained_betas=[0.01] * 1000))
    assert own.notices == () and own.objective.schedule.alphas_cumprod_T[0] == pytest.approx(0.99)


def test_a_missing_prediction_type_is_said_unless_it_is_chosen(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(bases, "sdxl", tmp_path, prediction_type="left out")
    assert "prediction_type" in family("sdxl", folder).notices[0]
    assert family("sdxl", folder, prediction_type="v_prediction").notices == ()
    assert family("sdxl", folder).objective.schedule.prediction_type == "epsilon"


def test_a_missing_shift_and_unknown_keys_are_said(bases: dict[str, Path], tmp_path: Path) -> None:
    found = family("z-image", copied(bases, "z-image", tmp_path, shift="left out", my_key=1, _mine=2)).notices
    assert any("my_key" in each and "(1)" in each for each in found) and any("no shift" in each for each in found)


@pytest.mark.parametrize("name", ["sdxl", "z-image", "flux", "anima"])
def test_a_whole_base_gets_no_notice_about_its_scheduler(bases: dict[str, Path], name: str) -> None:
    """The control."""
    assert not [each for each in family(name, bases[name]).notices if "scheduler config" in each]


@pytest.mark.parametrize("kind", [row.name for row in DDPM.classes])
def test_every_listed_class_is_accepted(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    found = family("sdxl", copied(bases, "sdxl", tmp_path, kind, _class_name=kind))
    assert found.notices == () and found.scheduler_config["beta_schedule"] == "scaled_linear"
