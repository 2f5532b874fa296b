"""Class images: drawn by the base alone, once, and trained on as regularisation images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lora_rocm.dataset.sources.scan import scan
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import StoppedError
from lora_rocm.families.base import PreviewRequest, Tensors, family_for
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import class_images, pipeline
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.lora_files import write_random_lora
from tests.tiny_models import RUN_TARGETS
from tests.train.runs import bytes_of, make_recipe, material, rewound, start
from tests.wording import saying

__all__ = ["material"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers, about NumPy

CPU = torch.device("cpu")
PROMPT = "a cat"


def recipe_with(material: Path, cache: Path, count: int = 3, **sections: Any) -> Recipe:
    sources = [
        {"path": str(material / "images")},
        {"class_prompt": PROMPT, "num_class_images": count, "is_reg": True},
    ]
    data = {"path": None, "sources": sources, "trigger_word": "zibu", "flip_aug": True}
    lora = {"train_text_encoder": True, **sections.pop("lora", {})}  # so the previews' texts are tokens
    first = {"train": {"max_train_steps": 1, "mixed_precision": "no"}, "sample": {"steps": 2}}
    return make_recipe(material, data=data, cache={"dir": str(cache)}, lora=lora, **{**first, **sections})


def drawn(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.glob("class-images/*/*"))}


def by_the_base(recipe: Recipe, number: int) -> Image.Image:
    """The image that the family draws with the base alone."""
    plain = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"train_text_encoder": False})})
    family = family_for(plain)
    text: dict[str, Tensors] = {PROMPT: {}, "": {}}
    for encoder in family.encoders():
        if encoder.entry.inputs == ("caption",):
            encode = encoder.load(Resident(DeviceTransfer(CPU, pin=False)))
            for prompt, tensors in text.items():
                tensors |= encode({"caption": prompt})
    model = family.load(torch.float32, CPU)
    request = PreviewRequest(PROMPT, "", 64, 64, 2, recipe.spec.guidance, number)
    (image,) = family.preview(model, [request], text.__getitem__)
    assert isinstance(image, Image.Image)
    return image


def draw(recipe: Recipe, run: Path, stopped: bool = False) -> tuple[Recipe, list[dict[str, Any]]]:
    """Draw the missing images; the recipe with the folder, and the events of the progress."""
    directory = RunDir(run)
    directory.path.mkdir(exist_ok=True)
    if stopped:
        directory.stop.touch()
    session = Session(directory, watch_parent=False)
    begin = pipeline.StartContext(session, recipe, CPU, torch.float32)
    try:
        encoding = Encoding(LatentCache(Path(recipe.cache.dir)), CPU, context=session.context)
        made = class_images.with_class_images(begin, family_for(recipe), encoding)
    finally:
        session.close()
    return made, [event for event in read_events(directory.events(), "cache") if event["what"] == "class images"]


def test_the_base_draws_them_once(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_images, "DRAWN_TOGETHER", 1)
    unet = family_for(recipe_with(material, tmp_path / "cache")).skeleton("unet")
    lora = write_random_lora(tmp_path / "start.safetensors", "unet", unet, RUN_TARGETS, rank=2)
    recipe = recipe_with(material, tmp_path / "cache", lora={"init_from": str(lora)})
    with pytest.raises(StoppedError, check=saying("train/what-is-drawn-stays")):
        draw(recipe, tmp_path / "stopped", stopped=True)
    first = drawn(tmp_path / "cache")
    assert list(first) == ["000000.png"]
    made, events = draw(recipe, tmp_path / "again")
    found = drawn(tmp_path / "cache")
    assert [(event["done"], event["total"]) for event in events][-1] == (2, 2), "what was there is not drawn again"
    assert list(found) == ["000000.png", "000001.png", "000002.png"] and len(set(found.values())) == 3
    assert found["000000.png"] == first["000000.png"]
    folder = Path(made.data.sources[1].path or "")
    with Image.open(folder / "000002.png") as image:
        apart = np.abs(np.asarray(image).astype(int) - np.asarray(by_the_base(recipe, 2)))
    assert apart.max() <= 1, "no trace of the adapter"
    # What is trained on
    samples = [sample for sample in scan(made.data).samples if sample.options.is_reg]
    assert [sample.caption for sample in samples] == [PROMPT] * 3, "the trigger word is of the others"
    assert all(not sample.options.trigger_word and sample.options.flip_aug for sample in samples)
    planned = [sample for sample in scan(recipe.data).samples if sample.options.is_reg]
    facts = [[(s.key, s.caption, s.width, s.height, s.repeats) for s in found] for found in (planned, samples)]
    assert facts[0] == facts[1], "check counts what a run trains on"
    # Fewer are the first ones
    fewer, events = draw(recipe_with(material, tmp_path / "cache", 2), tmp_path / "fewer")
    assert not events and [s.key for s in scan(fewer.data).samples if s.options.is_reg] == [s.key for s in samples[:2]]


@pytest.mark.slow
def test_a_run_trains_on_them_and_resumes_to_the_byte(material: Path, tmp_path: Path) -> None:
    """Also if the images were lost: the same ones are drawn again."""
    train = {"max_train_steps": 2, "gradient_accumulation_steps": 1, "mixed_precision": "no"}
    recipe = recipe_with(material, tmp_path / "cache", train=train, output={"save_every_n_steps": 1})
    assert start(recipe, tmp_path / "run") and len(drawn(tmp_path / "cache")) == 3
    (data,) = read_events(RunDir(tmp_path / "run").events(), "data")
    assert data["samples"] == 5 + 3 and not data["set_aside"]
    assert sum(data["buckets"].values()) == 2 * 5, "as many in an epoch as the others"
    rewound(tmp_path / "run", tmp_path / "stopped", 1)
    shutil.rmtree(tmp_path / "cache")
    assert start(recipe, tmp_path / "stopped")
    assert bytes_of(tmp_path / "stopped") == bytes_of(tmp_path / "run")


def test_what_decides_an_image_names_its_folder(material: Path, tmp_path: Path) -> None:
    def folder(**sections: Any) -> str:
        recipe = recipe_with(material, tmp_path, **sections)
        source = recipe.data.resolved_sources()[1]
        return class_images._wanted(recipe, source, family_for(recipe)).folder.name

    one = folder()
    assert one == folder(count=7, train={"max_train_steps": 9}, lora={"rank": 3})
    settings: list[dict[str, Any]] = [{}, {"sampler": "ddim"}, {"guidance_scale": 2.0}, {"negative_prompt": "dog"}]
    others = [folder(sample={"steps": 3, **sample}) for sample in settings]
    assert len({one, *others}) == 5
