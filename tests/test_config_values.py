"""No value of a config breaks a run: ``inspect``, ``check`` and ``train`` refuse it alike, or all take it."""

from __future__ import annotations

import ast
import json
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.base_models import config_faults
from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.base import family_for
from lora_rocm.families.registry import FAMILIES
from lora_rocm.model_files.config_file import Config, read_config, require_bounded
from lora_rocm.processes.jobs import BaseVerdict
from lora_rocm.train import dry_run
from lora_rocm.train.usable import judged, require_usable
from tests.config_mutations import VALUES, config_files, mutate, mutations, trial
from tests.test_usable_bases import SOUND, checked, recipe_of
from tests.tiny_models import SHALLOW, read_json, write_tiny_sdxl
from tests.tiny_sd import SHALLOW_SD, write_tiny_sd
from tests.tiny_z_image import write_tiny_z_image
from tests.train.runs import start

WRITERS: dict[str, Callable[[Path], object]] = {
    **{name: write for name, (_, write) in SOUND.items()},
    "sdxl": lambda folder: write_tiny_sdxl(folder, **SHALLOW),
    "z-image": write_tiny_z_image,
    "sd15": lambda folder: write_tiny_sd(folder, "sd15", SHALLOW_SD),
    "sd2": lambda folder: write_tiny_sd(folder, "sd2", SHALLOW_SD),
}
UNET, VAE, TEXT_2 = "unet/config.json", "vae/config.json", "text_encoder_2/config.json"
TRANSFORMER, SCHEDULER = "transformer/config.json", "scheduler/scheduler_config.json"
REFUSED: list[tuple[str, str, str, str, str]] = [
    ("sdxl", VAE, "scaling_factor", "null", "config-unreadable"),
    ("sdxl", VAE, "scaling_factor", "infinite", "config-absurd"),
    ("sdxl", VAE, "scaling_factor", "zero", "config-absurd"),
    ("sdxl", VAE, "norm_num_groups", "true", "config-unfit"),
    ("sdxl", TEXT_2, "eos_token_id", "null", "config-unreadable"),
    ("sdxl", TEXT_2, "eos_token_id", "list", "config-unreadable"),
    ("sdxl", TEXT_2, "eos_token_id", "number", "tokenizer-unfit"),
    ("sdxl", TEXT_2, "layer_norm_eps", "null", "config-absurd"),
    ("sdxl", TEXT_2, "num_attention_heads", "negative", "config-absurd"),
    ("sdxl", UNET, "addition_time_embed_dim", "text", "config-unreadable"),
    ("sdxl", UNET, "freq_shift", "text", "config-unfit"),
    ("sdxl", UNET, "norm_eps", "negative", "config-absurd"),
    ("sdxl", UNET, "layers_per_block", "list", "config-unfit"),
    ("sdxl", SCHEDULER, "beta_start", "text", "scheduler-unreadable"),
    ("sdxl", SCHEDULER, "steps_offset", "text", "scheduler-unreadable"),
    ("z-image", VAE, "shift_factor", "text", "config-unreadable"),
    ("z-image", TRANSFORMER, "rope_theta", "zero", "config-absurd"),
    ("z-image", TRANSFORMER, "t_scale", "null", "config-unfit"),
    ("z-image", SCHEDULER, "shift", "nan", "config-unreadable"),
    ("anima", TRANSFORMER, "in_channels", "null", "config-unreadable"),
    ("anima", VAE, "latents_mean", "missing", "config-unreadable"),
    ("anima", VAE, "latents_std", "list", "config-unreadable"),
    ("anima", "text_conditioner/config.json", "min_sequence_length", "text", "config-unfit"),
    ("flux", TEXT_2, "relative_attention_max_distance", "number", "config-unreadable"),
    ("flux", TEXT_2, "relative_attention_num_buckets", "zero", "config-unfit"),
    ("llama", "config.json", "intermediate_size", "zero", "config-unfit"),
    ("llama", "config.json", "eos_token_id", "huge", "config-absurd"),
    ("llama", "config.json", "hidden_act", "text", "config-unfit"),
]
TAKEN: list[tuple[str, str, str, str]] = [
    ("sdxl", VAE, "scaling_factor", "missing"),
    ("sdxl", "text_encoder/config.json", "eos_token_id", "number"),  # no part is pooled
    ("z-image", VAE, "shift_factor", "null"),
    ("z-image", SCHEDULER, "shift", "null"),
    ("llama", "config.json", "rms_norm_eps", "fraction"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sound")

    def written(name: str) -> Path:
        if not (folder / name).is_dir():
            WRITERS[name](folder / name)
        return folder / name

    return written


def judge(base: Path, name: str) -> BaseVerdict:
    return judged(base, FAMILIES[SOUND[name][0]])


def agreed(base: Path, name: str) -> UserError | None:
    """The common verdict of all three on a base."""
    recipe = recipe_of(name, base)
    refusal, verdict = checked(recipe), judge(base, name)
    assert bool(refusal) == bool(verdict.refusal)
    if refusal is not None:
        assert (verdict.problem["code"], verdict.problem["where"]) == (refusal.code, refusal.where)
        with pytest.raises(ModelError) as caught:  # what ``pipeline.train`` calls first
            require_usable(family_for(recipe), recipe)
        assert (caught.value.code, caught.value.where) == (refusal.code, refusal.where)
    else:
        assert trial(recipe) is None
    return refusal


@pytest.mark.parametrize(("name", "file", "key", "what", "code"), REFUSED)
def test_a_value_with_which_no_run_computes_is_refused_by_file_and_key(
    sound: Callable[[str], Path], tmp_path: Path, name: str, file: str, key: str, what: str, code: str
) -> None:
    base = Path(shutil.copytree(sound(name), tmp_path / name))
    mutate(base / file, key, what)
    refusal = agreed(base, name)
    assert refusal is not None and refusal.code == code
    assert refusal.where == f"{base / file}: {key}" and refusal.fix


def test_a_schedule_that_needs_a_package_which_is_not_there(
    sound: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusers.schedulers.scheduling_euler_discrete.is_scipy_available", lambda: False)
    base = Path(shutil.copytree(sound("sdxl"), tmp_path / "sdxl"))
    assert agreed(base, "sdxl") is None, "the control"
    mutate(base / SCHEDULER, "use_beta_sigmas", "true")
    refusal = agreed(base, "sdxl")
    assert refusal is not None
    assert (refusal.code, refusal.where) == ("scheduler-unreadable", f"{base / SCHEDULER}: use_beta_sigmas")


@pytest.mark.parametrize(("name", "file", "key", "what"), TAKEN)
def test_a_value_with_which_a_run_computes_is_taken(
    sound: Callable[[str], Path], tmp_path: Path, name: str, file: str, key: str, what: str
) -> None:
    base = Path(shutil.copytree(sound(name), tmp_path / name))
    mutate(base / file, key, what)
    assert agreed(base, name) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("sd2", "schnell")])
def test_no_value_of_any_key_breaks_a_run(sound: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    base = Path(shutil.copytree(sound(name), tmp_path / name))
    texts = {path: path.read_text(encoding="utf-8") for path in config_files(base)}
    num_refused, faults = 0, list[str]()
    for file, key, what in mutations(base):
        mutate(base / file, key, what)
        try:
            num_refused += agreed(base, name) is not None
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            faults.append(f"{file}: {key}: {what}: {type(error).__name__} at {place}: {str(error)[:200]}")
        (base / file).write_text(texts[base / file], encoding="utf-8")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults])
    assert num_refused > 50


@pytest.mark.parametrize("end", [2, "tokenizer"])
def test_clip_pools_at_the_end_that_its_tokenizer_writes_or_by_the_old_rule(
    sound: Callable[[str], Path], tmp_path: Path, end: object
) -> None:
    base = Path(shutil.copytree(sound("sdxl"), tmp_path / "sdxl"))
    config = read_json(base / TEXT_2)
    its = read_json(base / "text_encoder/config.json")["eos_token_id"]
    (base / TEXT_2).write_text(json.dumps({**config, "eos_token_id": its if end == "tokenizer" else end}))
    assert agreed(base, "sdxl") is None


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("end", [99_999, [1, 99_999], "x"])
def test_an_end_that_a_language_model_has_no_row_for(
    sound: Callable[[str], Path], tmp_path: Path, file: str, end: object
) -> None:
    base = Path(shutil.copytree(sound("llama"), tmp_path / "llama"))
    (base / file).write_text(
        json.dumps({**(read_json(base / file) if (base / file).is_file() else {}), "eos_token_id": end})
    )
    refusal = agreed(base, "llama")
    assert refusal is not None and refusal.where in (f"{base / file}: eos_token_id", str(base))


def test_a_chat_template_that_does_not_compile(sound: Callable[[str], Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(sound("llama"), tmp_path / "llama"))
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }", encoding="utf-8")
    refusal = agreed(base, "llama")
    assert refusal is not None
    assert (refusal.code, refusal.where) == ("chat-template-fails", str(base / "chat_template.jinja"))


def test_what_a_base_lacks_without_harm_is_noted_by_inspect_and_check(
    sound: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = Path(shutil.copytree(sound("llama"), tmp_path / "llama"))
    assert judge(plain, "llama").notices == ()
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    config = read_json(plain / "tokenizer_config.json")
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert any("chat template" in notice for notice in judge(plain, "llama").notices)
    unnamed = Path(shutil.copytree(sound("z-image"), tmp_path / "z-image"))
    mutate(unnamed / SCHEDULER, "_class_name", "missing")
    assert any("_class_name" in notice for notice in judge(unnamed, "z-image").notices)


def test_a_run_refuses_it_before_anything_is_encoded(sound: Callable[[str], Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(sound("sdxl"), tmp_path / "sdxl"))
    mutate(base / UNET, "freq_shift", "text")
    recipe = recipe_of("sdxl", base)
    train = recipe.train.model_copy(update={"mixed_precision": "no"})
    with pytest.raises(ModelError) as caught:
        start(recipe.model_copy(update={"train": train}), tmp_path / "run")
    assert caught.value.where == f"{base / UNET}: freq_shift"


def test_the_meta_device_does_not_decide_where_numbers_are_read(
    sound: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that reads a number is not judged; any other failure is, and without one nothing is reported."""
    recipe = recipe_of("llama", sound("llama"))
    family = family_for(recipe)

    def fails(error: Exception) -> Callable[..., Any]:
        def losses(*args: object) -> None:
            raise error

        return losses

    for error in (RuntimeError("Tensor.item() cannot be called on meta tensors"), None, TypeError("no number")):
        dry_run.VERDICTS.clear()
        with monkeypatch.context() as patch:
            if error is not None:
                patch.setattr(dry_run, "losses", fails(error))
            patch.setattr(config_faults, "suspects", lambda values, defaults, error: [])
            if isinstance(error, TypeError):
                with pytest.raises(ModelError) as caught:
                    dry_run.require_computable(family, recipe)
                assert caught.value.code == "config-unfit"
            else:
                dry_run.require_computable(family, recipe)
    dry_run.VERDICTS.clear()


def test_a_base_that_an_earlier_start_accepted_is_not_computed_again(
    sound: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values in a config, another version of a library, and a damaged file make a start compute it."""
    base, accepted = Path(shutil.copytree(sound("llama"), tmp_path / "llama")), tmp_path / "accepted.json"
    computed: list[object] = []
    losses = dry_run.losses

    def counted(*args: Any) -> object:
        computed.append(args)
        return losses(*args)

    def times() -> int:
        """Return how often the next process would compute."""
        computed.clear()
        dry_run.VERDICTS.clear()
        dry_run.recall(accepted)
        recipe = recipe_of("llama", base)
        dry_run.require_computable(family_for(recipe), recipe)
        return len(computed)

    monkeypatch.setattr(dry_run, "losses", counted)
    assert times() == 1
    dry_run.remember(accepted)
    assert times() == 0
    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "version", lambda name: "0.0.1")
        assert times() == 1
    for damaged in ("[1, null", '{"a": 1}', "[1, null]"):
        whole = accepted.read_bytes()
        accepted.write_text(damaged, encoding="utf-8")
        assert times() == 1
        accepted.write_bytes(whole)
    mutate(base / "config.json", "hidden_act", "text")
    with pytest.raises(ModelError) as caught:
        times()
    assert caught.value.code == "config-unfit"
    dry_run.remember(accepted)
    with pytest.raises(ModelError):
        times()
    dry_run.VERDICTS.clear()


def test_only_the_newest_acceptances_are_read(tmp_path: Path) -> None:
    """A file of any length costs a start nothing, and the file becomes short."""
    accepted, keys = tmp_path / "accepted.json", [f"key {number}" for number in range(3 * dry_run.KEPT)]
    accepted.write_text(json.dumps([["deep"], *keys]), encoding="utf-8")
    dry_run.VERDICTS.clear()
    dry_run.recall(accepted)
    assert [*dry_run.VERDICTS] == keys[-dry_run.KEPT :]
    dry_run.VERDICTS["new"] = None
    dry_run.remember(accepted)
    assert json.loads(accepted.read_text(encoding="utf-8")) == [*keys[1 - dry_run.KEPT :], "new"]
    dry_run.VERDICTS.clear()


def test_published_configs_are_plausible() -> None:
    folders = Path(str(dry_run.__file__)).parents[1] / "families"
    paths = sorted(folders.glob("*/config*/*/config.json"))
    assert len(paths) > 20
    for path in paths:
        require_bounded(read_config(path), path)


READERS: Mapping[str, tuple[Callable[[Config], object], Any]] = {
    "whole": (lambda config: config.whole("key"), 3),
    "number": (lambda config: config.number("key", 1.0, above=0), 0.5),
    "numbers": (lambda config: config.numbers("key", 2), [1, 2.5]),
    "flag": (lambda config: config.flag("key"), True),
    "texts": (lambda config: config.texts("key"), ["a"]),
    "length": (lambda config: config.length("key"), [1]),
    "ids": (lambda config: config.ids("key", 10), [3, 4]),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_its_type_and_refuses_others_by_key(name: str) -> None:
    read, good = READERS[name]
    assert read(Config({"key": good}, Path("config.json"))) in (good, len(good) if isinstance(good, list) else good)
    num_refused = 0
    for value in VALUES.values():
        try:
            read(Config({"key": value}, Path("config.json")))
        except ModelError as error:
            assert (error.code, error.where) == ("config-unreadable", "config.json: key")
            num_refused += 1
    assert num_refused >= 8


def test_families_read_configs_by_type_alone() -> None:
    """No family takes a value of a config by its key: ``Config`` has a method for each type."""
    allowed = {
        "families/common/unet/detect.py",
        "families/objectives/schedulers.py",
        "families/common/dit/detect.py",
    }
    package = Path(str(dry_run.__file__)).parents[1]
    found = []
    for path in sorted((package / "families").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            read = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
            is_get = isinstance(node, ast.Attribute) and node.attr == "get"
            raw = isinstance(read, ast.Attribute) and read.attr == "values" and not isinstance(read.value, ast.Constant)
            if raw and (isinstance(node, ast.Subscript) or is_get):
                found.append(path.relative_to(package).as_posix())
    assert set(found) <= allowed


def test_a_pass_on_meta_takes_no_memory_of_weights(sound: Callable[[str], Path]) -> None:
    source = family_for(recipe_of("sdxl", sound("sdxl"))).source  # type: ignore[attr-defined]
    hollow = dry_run.MetaSource.of(source, {}).load("unet", torch.bfloat16, torch.device("cpu"))
    assert all(tensor.is_meta for tensor in (*hollow.parameters(), *hollow.buffers()))
