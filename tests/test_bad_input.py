"""Mistakes of users: a short error with place, value and remedy, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_rocm.base_models import small_tensors
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.program import RECIPE, Program, images, snapshot
from tests.tiny_models import SHALLOW, tiny_pipeline, write_config_folder, write_single_file, write_tiny_sdxl
from tests.wording import Worded, holds, says, worded

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images, a recipe and a finished run ``runs/ok``, which no test may change."""
    root = tmp_path_factory.mktemp("Eingaben ü 100% [x]")
    write_tiny_sdxl(root / "model", **SHALLOW)
    images(root / "pics")
    (root / "r.yaml").write_text(RECIPE, encoding="utf-8")
    (root / "afile").write_text("x", encoding="utf-8")
    (root / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert Program(patch).train("runs/ok").code == 0
    return root


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.chdir(folder)
    before = snapshot(folder / "runs" / "ok")
    yield Program(monkeypatch)
    assert snapshot(folder / "runs" / "ok") == before


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "run"


# the recipe


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lora.rnk", "3", ["lora.rnk", worded("bad_input/did-you-mean-lora-rank")]),
        ("lora.rank", "many", ["lora.rank", "whole number", "'many'"]),
        ("train.max_train_steps", "true", ["train.max_train_steps", "true"]),
        ("optim.learning_rate", "-1", ["optim.learning_rate", "greater than", "-1"]),
        ("optim.betas", "[0.9, 1.0]", ["optim.betas[1]", worded("bad_input/less-than-1"), "1.0"]),
        ("optim.optimizer_args", "[d_coef=2]", ["optim.optimizer_args[0]", "adamw takes no 'd_coef'", "of prodigy"]),
        ("optim.optimizer_args", "[weight_decay=much]", ["optim.optimizer_args.weight_decay", "a number", "'much'"]),
        ("runtime.device", "tpu", ["runtime.device", "auto, cpu, gpu", "'tpu'"]),
        ("runtime.threads", "100000", ["runtime.threads", worded("bad_input/at-most-1024")]),
        ("data.caption_variants", "1000000", ["data.caption_variants", worded("bad_input/at-most-1000")]),
        ("data.bucket_step", "7", ["data.bucket_step", "multiple of 8 for SDXL, got 7", "Take 8."]),
        ("sample.width", "65", ["sample.width", worded("bad_input/multiple-of-8"), "65"]),
        ("sample.prompts", '["a\\0b"]', ["sample.prompts", "a\\x00b"]),
        ("data.path", "''", ["data.path", "''"]),
        ("data.path", "nowhere", ["data.path", "nowhere", worded("bad_input/correct-the-path")]),
        ("data.path", "afile", ["data.path", "afile", worded("bad_input/is-no-folder")]),
        (
            "data.watched",
            "{path: rows.jsonl}",
            ["data.watched.path", worded("bad_input/there-is-no-folder"), worded("bad_input/given-as-dataset")],
        ),
        ("data.sources", "[{path: pics}, {path: nowhere}]", ["data.sources[1].path", "nowhere"]),
        ("cache.dir", "afile", ["cache.dir", "afile", worded("bad_input/a-file-not-a-folder")]),
        ("output.dir", "afile/below", ["output.dir", "afile", worded("bad_input/move-that-file-away")]),
        ("model.config", "afile", ["model.config", "afile"]),
        ("lora.init_from", "nowhere.safetensors", ["lora.init_from", "nowhere.safetensors"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_values_that_cannot_be(
    program: Program, folder: Path, new: Path, command: str, key: str, value: str, words: list[str | Worded]
) -> None:
    before = sorted(folder.iterdir())
    arguments = ["--run-dir", str(new)] if command == "train" else []
    beside = ["--set", "train.validation_every_n_steps=0"]  # or data.watched alone is wrong
    said = program(command, "r.yaml", "--set", f"{key}={value}", *beside, *arguments).refused(2, *words)
    assert "--set" in said or "r.yaml:2" in said
    assert sorted(folder.iterdir()) == before and not new.exists()


def test_the_line_of_a_key_is_named(program: Program, folder: Path, tmp_path: Path, new: Path) -> None:
    recipe = tmp_path / "falsch.yaml"
    recipe.write_text(RECIPE.replace("rank: 2", "rank: zwei"), encoding="utf-8")
    program.train(new, recipe=recipe).refused(2, f"{recipe}:3 lora.rank", "'zwei'")


# images and captions


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.path=empty"], ["no images", "empty", worded("bad_input/put-images-there")]),
        (["data.resolution=8"], ["data.resolution: 8", worded("bad_input/bucket-step-of-16"), "Raise data.resolution"]),
        (["data.bucket_step=128"], [worded("bad_input/bucket-step-of-128"), "lower data.bucket_step"]),
        (["data.caption_fallback=error", "data.caption_extension=.cap"], ["p0.png", "Write a .cap file"]),
        (["data.caption_fallback=trigger", "data.caption_extension=.cap"], ["p0.png", "data.trigger_word"]),
        (
            ["data.exclude=['*.png']"],
            ["no images", "pics", "p0.png", worded("bad_input/correct-the-patterns-of-data-exclude")],
        ),
        (
            ["data.enable_wildcard=true", "data.caption_prefix={a|b"],
            ["p0.png: {a|b", worded("bad_input/close-the-wildcard")],
        ),
        (["data.alpha_mask=true"], [worded("bad_input/no-image-has-a-mask"), "pics", "Remove alpha_mask"]),
        (
            ["data.sources=[{path: pics, is_reg: true}]"],
            ["data.sources[0].is_reg", worded("bad_input/nothing-to-learn"), worded("bad_input/add-the-images")],
        ),
        (["data.sources=[{dataset: nowhere.parquet}]"], ["nowhere.parquet", worded("bad_input/correct-the-path")]),
        (["data.sources=[{dataset: afile}]"], ["afile", ".parquet"]),
        (["data.sources=[{dataset: someone/something}]"], ["someone/something", worded("bad_input/give-a-hub-id")]),
    ],
)
def test_data_that_cannot_be_used(program: Program, new: Path, sets: list[str], words: list[str | Worded]) -> None:
    program.train(new, *sets).refused(2, *words)
    program("check", "r.yaml", *[word for override in sets for word in ("--set", override)]).refused(2, *words)


def test_a_mask_of_another_size_is_named_before_anything_is_encoded(program: Program, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    Image.new("L", (400, 30), 255).save(tmp_path / "masks" / "p0.png")
    where = [
        f"data.mask_path={json.dumps(str(tmp_path / 'masks'))}",
        f"cache.dir={json.dumps(str(tmp_path / 'cache'))}",
    ]
    checked = program("check", "r.yaml", *[word for override in where for word in ("--set", override)])
    assert checked.code == 0 and says(checked.out, "bad_input/1-set-aside")
    assert says(checked.out, "bad_input/p0-png-the-mask-of-p0-png")
    assert says(checked.out, "bad_input/repair-the-mask") and not list(tmp_path.glob("cache/**/*.safetensors"))


def test_all_images_broken(program: Program, tmp_path: Path, new: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.png").write_bytes(b"no image")
    program.train(new, f"data.path={json.dumps(str(tmp_path))}").refused(2, "20 images", "00.png", "check")


def test_what_is_wrong_with_some_images_stops_nothing(program: Program, tmp_path: Path, new: Path) -> None:
    odd = images(tmp_path / "Bilder ü 100% [neu] (1) #'", count=6)
    for name in ("ein bild 50% [x] ü 🐱 'q'", "kein bild", "halb"):
        shutil.copy(odd / "p0.png", odd / f"{name}.png")
    (odd / "kein bild.png").write_bytes(b"\x89PNG no more")
    (odd / "halb.png").write_bytes((odd / "p0.png").read_bytes()[:6000])
    (odd / "p1.txt").write_bytes("café".encode("latin-1"))
    (odd / "p2.txt").write_text("🐱 " * 5000, encoding="utf-8")
    (odd / "p3.txt").write_bytes("a\0b\r\nc\u2028d".encode())
    (odd / "p4.txt").unlink()
    (odd / "p4.txt").mkdir()
    sample = "{steps: 1, prompts: ['🐱\u00a0é', '" + "x" * 10_000 + "', '']}"
    said = program.train(new, f"data.path={json.dumps(str(odd), ensure_ascii=False)}", f"sample={sample}")
    assert said.code == 0, said.text
    report = RunDir(new).report.read_text(encoding="utf-8")
    for name, why in (("kein bild", "not an image"), ("halb", "truncated"), ("p1", "not UTF-8")):
        line = next(line for line in said.out.splitlines() if f"{name}.png" in line and "skipped" in line)
        assert why in line and f"{name}.png" in report
    assert "6 samples in 1 bucket," in said.out and says(said.out, "bad_input/3-set-aside") and len(said.out) < 8000
    assert RunDir(new).lora.exists()


# base models


def as_sd15(model: Path) -> None:
    shutil.rmtree(model / "text_encoder_2")
    index = json.loads((model / "model_index.json").read_bytes())
    del index["text_encoder_2"]
    write_index(model, {**index, "_class_name": "StableDiffusionPipeline"})


def write_index(model: Path, index: dict[str, object]) -> None:
    (model / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def as_flux(model: Path) -> None:
    write_index(model, {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]})


def changed(file: str, **keys: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / file).read_bytes())
        (model / file).write_text(json.dumps({**config, **keys}), encoding="utf-8")

    return change


def damaged(file: str, content: bytes | None) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / file).unlink() if content is None else (model / file).write_bytes(content)

    return damage


def cut_short(model: Path) -> None:
    file = model / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def not_finite(model: Path) -> None:
    file = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({name: tensor * float("nan") for name, tensor in weights.items()}, file, {"format": "pt"})


def not_finite_where_large(model: Path) -> None:
    """With every tensor counted as a large one (in the test below): the model's output for an image shows it."""
    not_finite(model)


def of_unet(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    def changed_unet(model: Path) -> None:
        file = model / "unet" / "diffusion_pytorch_model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return changed_unet


def without(start: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if not name.startswith(start)}


without_a_block = of_unet(without("mid_block."))
with_whole_numbers = of_unet(lambda weights: {n: (100 * t).to(torch.int8) for n, t in weights.items()})


def like_ssd_1b(model: Path) -> None:
    shutil.rmtree(model)
    write_tiny_sdxl(model)  # with SDXL's third block
    of_unet(without("down_blocks.2.attentions.0.transformer_blocks.1."))(model)


def with_a_vae_of_16_channels(model: Path) -> None:
    weights = tiny_pipeline(vae={**SHALLOW["vae"], "latent_channels": 16}).vae.state_dict()
    save_file(weights, model / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (as_sd15, [worded("bad_input/stable-diffusion-1-x"), "set model.family: sd15", "use an SDXL base model"]),
        (as_flux, ["FLUX", "set model.family: flux", "use an SDXL base model"]),
        (
            changed("unet/config.json", in_channels=None),
            ["unet/config.json: in_channels", worded("bad_input/download-the-model-again")],
        ),
        (changed("unet/config.json", cross_attention_dim=96), ["unet", worded("bad_input/download-the-model-again")]),
        (changed("unet/config.json", block_out_channels="x"), ["unet", worded("bad_input/download-the-model-again")]),
        (changed("text_encoder/config.json", hidden_size=64), ["text_encoder", "of another shape"]),
        (changed("scheduler/scheduler_config.json", prediction_type="sample"), ["'sample'", "scheduler_config.json"]),
        (changed("unet/config.json", quantization_config={"quant_method": "gptq"}), ["gptq", "unet/config.json"]),
        (changed("unet/config.json", layers_per_block=10_000), ["unet/config.json", "layers"]),
        (
            changed("tokenizer_2/tokenizer.json", model={"type": "?"}),
            ["tokenizer_2/tokenizer.json", worded("bad_input/cannot-be-read")],
        ),
        (without_a_block, ["unet", "tensors are missing, for example mid_block."]),
        (like_ssd_1b, ["unet", "tensors are missing, for example down_blocks.2.attentions.0.transformer_blocks.1."]),
        (with_a_vae_of_16_channels, ["vae", "of another shape"]),
        (with_whole_numbers, ["integers (I8)", "float16"]),
        (damaged("model_index.json", b"{"), ["model_index.json", worded("bad_input/download-the-model-again")]),
        (
            damaged("vae/config.json", None),
            ["vae/config.json", "is missing", worded("bad_input/download-the-model-again")],
        ),
        (damaged("tokenizer/tokenizer_config.json", None), ["tokenizer", "model_max_length", "Download"]),
        (damaged("tokenizer/tokenizer.json", b"{"), ["tokenizer", worded("bad_input/cannot-be-read"), "Download"]),
        (cut_short, ["diffusion_pytorch_model.safetensors", "damaged", worded("bad_input/download-or-copy")]),
        (
            not_finite,
            ["vae/diffusion_pytorch_model.safetensors", "not finite", worded("bad_input/download-the-model-again")],
        ),
        (not_finite_where_large, ["latent_mean", "not finite", "p0.png", "damaged"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_model_folders_that_cannot_be_used(
    program: Program,
    folder: Path,
    tmp_path: Path,
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    words: list[str | Worded],
) -> None:
    is_seen_early = change is not not_finite_where_large
    if not is_seen_early:
        monkeypatch.setattr(small_tensors, "MAX_SMALL_BYTES", 0)
    model = Path(shutil.copytree(folder / "model", tmp_path / "model"))
    change(model)
    sets = [f"model.name_or_path={json.dumps(str(model))}", f"cache.dir={json.dumps(str(tmp_path / 'cache'))}"]
    said = program.train(new, *sets)
    said.refused(2, str(tmp_path) if is_seen_early else "p0.png", *words)
    if is_seen_early:  # in names, shapes, configs and small tensors
        assert not (tmp_path / "cache" / "image").exists()
        checked = program("check", "r.yaml", *(word for override in sets for word in ("--set", override)))
        checked.refused(2, *words)
        assert "valid" not in checked.text


def test_a_sound_base_is_valid_and_the_next_command_is_last(program: Program) -> None:
    said = program("check", "r.yaml")
    verdict, following = said.out.rstrip().splitlines()[-2:]
    assert said.code == 0 and verdict.endswith("r.yaml: valid") and following.endswith("lora-rocm train r.yaml")
    assert said.out.count("valid") == 1


@pytest.fixture(scope="module")
def files(folder: Path) -> Path:
    """Base models in one file, whole and not."""
    pipeline = tiny_pipeline()
    whole = write_single_file(pipeline, folder / "one.safetensors").read_bytes()
    write_config_folder(pipeline, folder / "configs")
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "cut early.safetensors").write_bytes(whole[:1000])
    (folder / "nothing.safetensors").write_bytes(b"")
    (folder / "pickled.safetensors").write_bytes(pickle.dumps({"a": 1}))
    (folder / "old.ckpt").write_bytes(pickle.dumps({"a": 1}))
    (folder / "old.bin").write_bytes(b"PK\x03\x04")
    return folder


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nowhere", [worded("bad_input/no-such-folder-or-file"), "builtin:tiny-sdxl"]),
        ("nowhere.safetensors", [worded("bad_input/no-such-folder-or-file")]),
        ("builtin:nothing", [worded("bad_input/no-such-model"), "builtin:tiny-sdxl"]),
        (
            "someone/something",
            ["model.name_or_path", worded("bad_input/hub-cannot-be-reached"), worded("bad_input/give-its-folder")],
        ),
        ("old.ckpt", ["pickle", worded("bad_input/can-run-any-program"), ".safetensors files"]),
        ("old.bin", ["pickle", ".safetensors files"]),
        ("cut.safetensors", ["damaged", worded("bad_input/download-or-copy")]),
        ("cut early.safetensors", ["damaged", worded("bad_input/download-or-copy")]),
        ("nothing.safetensors", ["damaged", worded("bad_input/download-or-copy")]),
        ("pickled.safetensors", ["damaged", worded("bad_input/download-or-copy")]),
        ("afile", [worded("bad_input/not-a-safetensors-file"), worded("bad_input/give-a-safetensors")]),
        ("runs/ok/lora.safetensors", [worded("bad_input/a-lora-file-not-a-base-model"), "Use an SDXL base model"]),
        (
            "model/unet",
            [worded("bad_input/no-diffusers-model"), worded("bad_input/give-the-folder-of-the-whole-model")],
        ),
        ("configs", [worded("bad_input/no-safetensors-weights"), worded("bad_input/download-the-model-again")]),
        ("empty", [worded("bad_input/no-diffusers-model"), "model_index.json"]),
    ],
)
def test_base_models_that_cannot_be_used(
    program: Program, files: Path, new: Path, model: str, words: list[str | Worded]
) -> None:
    said = program.train(new, f"model.name_or_path={model}")
    assert model in said.refused(2, *words)
    program("check", "r.yaml", "--set", f"model.name_or_path={model}").refused(2, *words)


def test_other_keys_of_the_model(program: Program, files: Path, new: Path) -> None:
    for vae, words in (("nowhere", "no such folder"), ("old.ckpt", "pickle"), ("model/unet", "not a VAE of SDXL")):
        program.train(new / vae, f"model.vae={vae}").refused(2, vae, words)
    program.train(new / "c", "model.config=configs").refused(2, "model.config", "single-file", "Remove model.config")
    one = "model.name_or_path=one.safetensors"
    shutil.copytree(files / "configs", files / "other")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.move(files / "other" / name, files / f"other {name}")
    program.train(new / "d", one, "model.config=other").refused(2, "one.safetensors", "tokenizer", "model.config")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.move(files / f"other {name}", files / "other" / name)
    vae = json.loads((files / "other" / "vae" / "config.json").read_text(encoding="utf-8"))
    vae["block_out_channels"] = [2 * width for width in vae["block_out_channels"]]
    (files / "other" / "vae" / "config.json").write_text(json.dumps(vae), encoding="utf-8")
    said = program.train(new / "f", one, "model.config=other").refused(2, "one.safetensors", "vae", "of another shape")
    assert "ignore_mismatched_sizes" not in said  # the library's advice to programmers
    assert program.train(new / "e", one, "model.config=configs").code == 0


def test_a_hub_that_never_answers_is_given_up(program: Program, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and prints nothing
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr("lora_rocm.base_models.hub.ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("lora_rocm.dataset.rows.hf_datasets.ANSWER_TIMEOUT_S", 0.5)
    with listener:
        for key, value, words in (
            ("model.name_or_path", "someone/else", "cannot be reached"),
            ("data.sources", "[{dataset: someone/else}]", "does not answer"),
        ):
            started = time.monotonic()
            program.train(new / key, f"{key}={value}").refused(2, "someone/else", words)
            assert 0.5 <= time.monotonic() - started < 20  # it did wait for an answer, and not for ever


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_cannot_be_reached_by_real_processes(folder: Path, tmp_path: Path, answers: bool) -> None:
    """Without HF_HUB_OFFLINE: nobody listens at the port, or a server that never answers."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        if not answers:
            listener.close()
        for command in (["check"], ["train", "--run-dir", str(tmp_path / "run")]):
            words = [sys.executable, "-m", "lora_rocm", *command, "r.yaml", "--set", "model.name_or_path=some/model"]
            done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
            assert "model.name_or_path: some/model" in done.stderr and says(done.stderr, "bad_input/give-its-folder")


# LoRA files


def renamed(weights: Weights) -> Weights:
    return {name.replace("lora_unet_", "lora_unet_x_"): tensor for name, tensor in weights.items()}


def widened(weights: Weights) -> Weights:
    return {name: torch.zeros(2, 640) if "lora_down" in name else tensor for name, tensor in weights.items()}


def as_dora(weights: Weights) -> Weights:
    ups = {name: tensor for name, tensor in weights.items() if "lora_up" in name}
    return weights | {name.replace("lora_up.weight", "dora_scale"): torch.ones(len(up), 1) for name, up in ups.items()}


@pytest.mark.parametrize(
    ("change", "sets", "words"),
    [
        (lambda weights: weights, ["lora.rank=1"], ["rank 2", "Set lora.rank to 2"]),
        (renamed, [], ["This model lacks", "lora_unet_x_", "made for SDXL"]),
        (widened, [], ["8 x 640", worded("bad_input/made-for-this-models-family")]),
        (as_dora, [], ["DoRA", "lora.use_dora"]),
        (lambda weights: {name: tensor * float("nan") for name, tensor in weights.items()}, [], ["nan", "Use another"]),
        (
            lambda weights: {"transformer.x.lora_A.weight": torch.ones(2, 8)},
            [],
            [worded("bad_input/a-factor-is"), "transformer.x"],
        ),
    ],
    ids=["rank", "another model", "another width", "DoRA", "not finite", "half"],
)
def test_loras_that_do_not_fit(
    program: Program,
    folder: Path,
    new: Path,
    change: Callable[[Weights], Weights],
    sets: list[str],
    words: list[str | Worded],
) -> None:
    lora = new.parent / "given.safetensors"
    save_file(change(load_file(folder / "runs" / "ok" / "lora.safetensors")), lora)
    said = program.train(new, f"lora.init_from={json.dumps(str(lora))}", *sets).refused(2, "given.safetensors")
    assert all(holds(said, word) for word in words), said


def test_a_run_outlives_the_file_that_it_started_from(program: Program, folder: Path, new: Path) -> None:
    lora, again = new.parent / "start.safetensors", new.parent / "again"
    lora.write_bytes((folder / "runs" / "ok" / "lora.safetensors").read_bytes())
    start = f"lora.init_from={json.dumps(str(lora))}"
    assert program.train(new, start, "train.max_train_steps=1").code == 0
    shutil.copytree(new, again)
    assert program.train(new, start, "train.max_train_steps=2", resume=new).code == 0
    lora.unlink()
    assert program.train(again, start, "train.max_train_steps=2", resume=again).code == 0
    assert (again / "lora.safetensors").read_bytes() == (new / "lora.safetensors").read_bytes()
    assert program("export", again, "--format", "peft").code == 0
    program.train(new.parent / "fresh", start).refused(2, "lora.init_from", "start.safetensors")


def test_files_that_are_no_lora(program: Program, files: Path, new: Path) -> None:
    whole = (files / "runs" / "ok" / "lora.safetensors").read_bytes()
    (files / "cut lora.safetensors").write_bytes(whole[:-100])
    for number, (name, words) in enumerate(
        {
            "cut lora.safetensors": "damaged",
            "pickled.safetensors": "damaged",
            "old.ckpt": "pickle",
            "one.safetensors": "no LoRA",
            "pics": "0 safetensors files",
        }.items()
    ):
        program.train(new / str(number), f"lora.init_from={name}").refused(2, name, words)


@pytest.mark.parametrize("targets", ["nothing", "[]", "'(x'"])
def test_targets(program: Program, new: Path, targets: str) -> None:
    program.train(new, f"lora.targets={targets}").refused(2, "lora.targets")


# sample, export, status, report

SMALL = ("--prompt", "a cat", "--steps", "1", "--width", "64", "--height", "64")


def test_sample_and_export_of_what_is_not_there(program: Program, files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "runs" / "ok" / "lora.safetensors", tmp_path / "alone.safetensors")
    alone, young = tmp_path / "alone.safetensors", tmp_path / "young"
    young.mkdir()
    shutil.copy(files / "runs" / "ok" / "recipe.yaml", young)
    program("sample", alone, *SMALL).refused(2, alone, "--base")
    program("sample", alone, *SMALL, "--base", "nowhere").refused(2, "nowhere", "Give a diffusers folder")
    program("sample", alone, *SMALL, "--base", "builtin:tiny-sdxl").refused(
        2, alone, "This model lacks", "give the base"
    )
    program("sample", alone, *SMALL, "--config", "configs").refused(2, "--config configs", "--base")
    program("sample", young, *SMALL).refused(2, young, "Continue the training first")
    program("sample", "runs/ok", "--prompt", "x", "--width", "65").refused(2, "--width 65", "Take 64 or 72")
    program("sample", "runs/ok", *SMALL, "--strength", "nan").refused(2, "--strength")
    program("sample", "old.ckpt", *SMALL, "--base", "model").refused(2, "old.ckpt", "pickle")
    program("export", young, "--format", "kohya").refused(2, young, "Continue the training first")
    program("export", alone, "--format", "kohya").refused(2, alone, "Use a run directory")
    (young / "recipe.yaml").write_text("lora: {rank: x}", encoding="utf-8")
    program("export", young, "--format", "kohya").refused(2, f"{young / 'recipe.yaml'}:1 lora.rank", "'x'")
    for command in ("status", "report"):
        for place in ("pics", "nowhere", "afile"):
            program(command, place).refused(2, place, "Use a run directory")
    program("sample", alone, *SMALL, "--base", "model", "--output", "afile").refused(
        2, "afile", "Give the name of a folder"
    )
    said = program("sample", alone, *SMALL, "--base", "model", "--output", tmp_path / "drawn")
    (drawn,) = (tmp_path / "drawn").iterdir()
    assert said.code == 0 and f"Drew {drawn}" in said.out


def test_a_damaged_event_log_hides_nothing_else(program: Program, folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "runs" / "ok", tmp_path / "run"))
    lines = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(b'\xff\n{"type": "step"}\n{"type": "error"}\n' + lines + b'{"type": "data"}\n[]')
    assert "finished" in program("status", run).out and says(program("status", run).out, "bad_input/step-2-of-2")
    assert program("report", run).code == 0


def test_every_event_of_a_real_run_is_read(folder: Path) -> None:
    """The kinds that readers expect of fields are those that a run writes."""
    path = folder / "runs" / "ok" / "events.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [event["type"] for event in read_events(path)] == [line["type"] for line in lines]
    assert {"start", "data", "cache", "step", "canary", "checkpoint", "export", "end"} <= {
        line["type"] for line in lines
    }
