"""Commands that load a base for a run notice that it differs from the base of the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lora_rocm.children import chat as chat_child
from lora_rocm.children import compare as compare_child
from lora_rocm.children import conversions, model_child
from lora_rocm.errors import AdapterError
from lora_rocm.processes.jobs import ChatJob, CompareJob, ExportJob, SampleJob
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext
from tests.tiny_llm import write_tiny_llm
from tests.train.runs import make_recipe, start, write_material
from tests.wording import says

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
UNET, TEXT = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
Said = list[Any]


def negated(path: Path) -> None:
    """One weight matrix with another sign."""
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 2 and "embed" not in name)
    tensors[name] = -tensors[name]
    save_file(tensors, path, {"format": "pt"})


class Trained:
    """A finished run on its own base, and the messages of commands on it."""

    def __init__(self, run_dir: Path, base: Path) -> None:
        self.dir, self.base, self.events = RunDir(run_dir), base, Said()

    def notices(self) -> list[str]:
        return [event.text for event in self.events if event.type == "notice"]

    @property
    def spare(self) -> Path:
        """A folder for the cache, as the parent of a command gives one."""
        return self.dir.path.parent / "spare"

    def sample(self, base: Path | None = None) -> None:
        named = None if base is None else str(base)
        job = SampleJob(source=self.dir.path, output=self.dir.path / "drawn", prompt="cat", base=named, steps=1, seed=1)
        model_child.sample(replace(job, spare_cache=self.spare))

    def compare(self) -> None:
        files = tuple(self.dir.checkpoint_loras()[-1:])
        job = CompareJob(source=self.dir.path, prompts=("cat",), strengths=(1.0,), files=files, output=self.dir.path)
        compare_child.compare(replace(job, spare_cache=self.spare))

    def export(self, form: str) -> None:
        output = self.dir.path.parent / f"{form}-out"
        model_child.export_run(ExportJob(source=self.dir.path, format=form, output=output, spare_cache=self.spare))

    def chat(self) -> None:
        class Nobody:
            stopped = False

            def next(self) -> None:
                return None

        job = ChatJob(adapter=self.dir.peft_dir / "model", recipe=self.dir.recipe, spare_cache=self.spare)
        chat_child.chat(job, requests=Nobody(), emit=self.events.append)


def listening(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Trained:
    for module in (conversions, model_child, compare_child):
        monkeypatch.setattr(module, "emit", trained.events.append)
    monkeypatch.setattr(compare_child, "CONTEXT", RunContext(emit=trained.events.append))
    return trained


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_material(tmp_path_factory.mktemp("drawn"))
    train = {"max_train_steps": 1, "batch_size": 1, "gradient_accumulation_steps": 1}
    more: dict[str, Any] = {"sample": {"width": 64, "height": 64}, "output": {"save_every_n_steps": 1}}
    assert start(make_recipe(folder, train=train, **more), folder / "run")
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_tiny_llm(folder / "model")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("Two red cats play in the barn.", encoding="utf-8")
    sections = {
        "model": {"family": "causal-lm", "name_or_path": str(folder / "model")},
        "data": {"path": str(folder / "texts")},
        "lora": {"rank": 2},
        "train": {"max_train_steps": 1, "batch_size": 1, "mixed_precision": "no"},
        "cache": {"dir": str(folder / "cache")},
    }
    assert start(recipe_from(sections), folder / "run")
    return folder


@pytest.fixture
def images(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return listening(Trained(drawn / "run", drawn / "model"), monkeypatch)


@pytest.fixture
def texts(written: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return listening(Trained(written / "run", written / "model"), monkeypatch)


def refused(trained: Trained, file: str, command: Callable[[], None]) -> AdapterError:
    """The refusal of a command with a negated matrix in a file of the base; the file is restored."""
    path = trained.base / file
    content = path.read_bytes()
    negated(path)
    try:
        with pytest.raises(AdapterError) as caught:
            command()
    finally:
        path.write_bytes(content)
    assert caught.value.code == "export-other-base" and str(trained.base) in caught.value.where
    return caught.value


@pytest.mark.parametrize("name", ["sample", "compare"])
def test_an_image_base_that_changed_is_refused(images: Trained, name: str) -> None:
    command = getattr(images, name)
    command()
    assert not any("base" in text for text in images.notices()), "the control"
    refused(images, UNET, command)
    assert "text encoders" in refused(images, TEXT, command).what


@pytest.mark.parametrize("name", ["chat", "merged"])
def test_a_language_model_that_changed_is_refused(texts: Trained, name: str) -> None:
    def command() -> None:
        texts.chat() if name == "chat" else texts.export("merged")

    command()
    assert not any("base" in text for text in texts.notices()), "the control"
    refused(texts, "model.safetensors", command)


def test_a_base_that_the_user_names_is_a_notice(images: Trained, tmp_path: Path) -> None:
    other = Path(shutil.copytree(images.base, tmp_path / "other"))
    images.sample(other)
    assert images.notices() == [], "the same files elsewhere"
    negated(other / UNET)
    images.sample(other)
    assert says(images.notices(), "train/not-those-that-this-adapter-was-trained")


def test_a_lora_file_holds_nothing_of_the_base_so_its_export_is_a_notice(images: Trained, tmp_path: Path) -> None:
    path = images.base / UNET
    content = path.read_bytes()
    images.export("peft")
    assert images.notices() == []
    negated(path)
    try:
        images.export("peft")
    finally:
        path.write_bytes(content)
    assert says(images.notices(), "train/not-those-that-this-adapter-was-trained")


def test_without_a_checkpoint_nothing_is_compared_and_that_is_said(texts: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(texts.dir.path, tmp_path / "run"))
    for _, folder in RunDir(run_dir).list_checkpoints():
        shutil.rmtree(folder)
    alone = Trained(run_dir, texts.base)
    alone.chat()
    assert says(alone.notices(), "train/was-not-compared")
    assert load_recipe(alone.dir.recipe).recipe.model.name_or_path == str(texts.base)
