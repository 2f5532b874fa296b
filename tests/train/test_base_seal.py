"""A resume uses the base that the run began with: other bytes are refused, regardless of times and memories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_rocm.base_models import loading
from lora_rocm.device.placement.base import Resident, Sent
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import ResumeError
from lora_rocm.model_files.header import read_header
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.base_seal import broken, seals_of
from lora_rocm.train.checkpoint import latest_valid, save_checkpoint
from tests.event_lines import read_events
from tests.tiny_models import SHALLOW, write_tiny_sdxl
from tests.train.runs import DTYPES, make_recipe, start, write_material
from tests.wording import says

UNET = "unet/diffusion_pytorch_model.safetensors"


def test_seals_are_of_component_and_format() -> None:
    half, whole = torch.float16, torch.float32
    sent = {"unet.a": Sent(half, 1), "unet.b.base_layer.weight": Sent(half, 2), "text_encoder.a": Sent(whole, 3)}
    seals = seals_of(sent)
    assert seals.keys() == {"unet float16", "text_encoder float32"}
    assert seals_of(dict(reversed(sent.items()))) == seals
    assert seals_of({**sent, "unet.b.weight": sent["unet.b.base_layer.weight"]}) != seals
    assert seals_of({**{k: v for k, v in sent.items() if "b." not in k}, "unet.b.weight": Sent(half, 2)}) == seals
    for name in sent:
        assert seals_of({**sent, name: Sent(sent[name].dtype, 9)}) != seals
    assert broken(seals, seals_of({**sent, "unet.a": Sent(half, 9)})) == ["unet float16"]
    assert broken(seals, seals_of({**sent, "unet.a": Sent(whole, 9)})) == ["unet float16"]  # one is missing from it
    assert broken(seals, {"unet bfloat16": "x"}) == broken({}, seals) == []


def test_what_stays_on_the_host_is_in_it_too() -> None:
    def sealed(staying: tuple[int, ...]) -> dict[str, str]:
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)).requires_grad_(False)
        torch.nn.init.constant_(module[0].weight, 0.5)
        torch.nn.init.constant_(module[1].weight, 0.25)
        for layer in module:
            torch.nn.init.zeros_(layer.bias)
        placement = Resident(DeviceTransfer(torch.device("cpu"), pin=False))
        placement.send(module, "unet", [id(list(module.parameters())[number]) for number in staying])
        return seals_of(placement.fingerprints())

    assert sealed(()) == sealed((0, 2)) == sealed((0, 1, 2, 3))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of other runs, but with a model that has large tensors."""
    folder = write_material(tmp_path_factory.mktemp("material"))
    shutil.rmtree(folder / "model")
    write_tiny_sdxl(folder / "model", unet={**SHALLOW["unet"], "time_embedding_dim": 512}, vae=SHALLOW["vae"])
    return folder


def recipe_of(material: Path, model: Path | None = None) -> Recipe:
    train = {"max_train_steps": 3, "batch_size": 1, "gradient_accumulation_steps": 1}
    return make_recipe(
        material,
        model={"name_or_path": str(model or material / "model")},
        train=train,
        output={"save_every_n_steps": 1},
    )


@pytest.fixture(scope="module")
def begun(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first updates."""
    run_dir = tmp_path_factory.mktemp("begun") / "run"
    assert not start(recipe_of(material), run_dir, stop_at=1)
    return run_dir


@pytest.fixture
def case(material: Path, begun: Path, tmp_path: Path) -> Callable[..., Any]:
    """Goes on with a copy of the run, after ``change`` was made to the model's file; then that is as it was."""
    path = material / "model" / UNET

    def resume(change: Callable[[Path], None] = lambda path: None, **how: Any) -> tuple[bool, Path]:
        run_dir = tmp_path / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(begun, run_dir)
        found, content = path.stat(), path.read_bytes()
        change(path)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        try:
            return start(recipe_of(material), run_dir, stop_at=2, **how), run_dir
        finally:
            path.write_bytes(content)

    return resume


def in_a_gap(path: Path) -> None:
    """Another sign for weights that are neither at the start, nor in the middle, nor at the end of a large tensor."""
    entry = max(read_header(path).tensors.values(), key=lambda entry: entry.end - entry.begin)
    place = entry.begin + (entry.end - entry.begin) // 4
    assert entry.end - entry.begin > 5 * (64 << 10)
    content = bytearray(path.read_bytes())
    for byte in range(place // 4 * 4 + 3, place // 4 * 4 + 400, 4):
        content[byte] ^= 0x80
    path.write_bytes(content)


def test_weights_that_change_between_two_starts_are_refused(case: Callable[..., Any]) -> None:
    with pytest.raises(ResumeError) as caught:
        case(in_a_gap)
    assert caught.value.code == "resume-base-changed"
    assert case()[1]  # negative control: unchanged, it resumes
    assert case(in_a_gap, accept_changes=True)[1]


def test_the_bytes_that_were_sent_are_compared_whatever_the_digest_says(
    case: Callable[..., Any], begun: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wrong digest, or memory that flips a bit behind it, would have it."""
    read, digests = loading.read_hashed, {}

    def believed(headers: Any, *how: Any) -> Any:
        return digests.setdefault(headers[0].path, read(headers, *how))

    monkeypatch.setattr(loading, "read_hashed", believed)
    case()
    with pytest.raises(ResumeError) as caught:
        case(in_a_gap)
    assert caught.value.code == "resume-base-changed" and caught.value.where.endswith("unet float32")


def test_another_number_format_is_no_other_base_and_is_sealed_from_then_on(
    case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DTYPES, "no", torch.bfloat16)
    _, run_dir = case()
    checkpoint, _ = latest_valid(RunDir(run_dir))
    assert checkpoint is not None
    assert {"unet float32", "unet bfloat16"} <= checkpoint.facts["base_seals"].keys()
    with pytest.raises(ResumeError, match="base model"):
        case(in_a_gap)  # there the digest of the read bytes decides


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from_with_a_word(
    material: Path, begun: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(Path(shutil.copytree(begun, tmp_path / "run")))
    found, _ = latest_valid(run_dir)
    assert found is not None
    parts = {part: dict(found.part_to_resume(part)) for part in ("adapter", "ema", "optimizer")}
    old = {key: value for key, value in found.facts.items() if key not in ("base_seals", "by_length")}
    shutil.rmtree(found.path)
    save_checkpoint(run_dir, found.position, parts, {**old, "base": "of samples", "data": "of samples"})
    start(recipe_of(material), tmp_path / "run", stop_at=2)
    notices = [event["text"] for event in read_events(RunDir(tmp_path / "run").events()) if event["type"] == "notice"]
    assert says(notices, "train/an-earlier-version")
    newest, _ = latest_valid(RunDir(tmp_path / "run"))
    assert newest is not None and newest.facts["base"] != "of samples" and "unet float32" in newest.facts["base_seals"]
    assert (found.facts["by_length"], newest.facts["by_length"]) == (True, False), "the order stays that of the run"
