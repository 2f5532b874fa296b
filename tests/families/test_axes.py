"""Samples with different axes than an image's, and images with companions of other sizes, from folder to preview."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.encoded_cache.cache import CachedItem
from lora_rocm.encoded_cache.controls import control_latents
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import Prepared, prepare
from lora_rocm.errors import RecipeError
from lora_rocm.families.base import PreviewRequest, family_for
from lora_rocm.families.objectives.base import CONTROL_LATENTS
from lora_rocm.memory.footprint import largest_of
from lora_rocm.recipe.load import load_recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import preview
from tests.fake_encoders import image
from tests.families.contract import CPU, FRAMES, Its
from tests.families.toy_families import TOYS
from tests.families.toys.wan_like import latent_frames
from tests.train.test_pipeline import start
from tests.wording import Worded, says, worded

CLIP, STILL = SampleShape.of(h=64, w=64, frames=FRAMES), SampleShape.of(h=64, w=64)


def shapes_of(prepared: Prepared) -> dict[str, SampleShape]:
    return {item.key: item.shape for item in prepared.items}


def latents_of(its: Its, prepared: Prepared, key: str) -> CachedItem:
    (item,) = (item for item in prepared.items if item.key == key)
    spec = next(encoder.entry for encoder in its.family.encoders() if encoder.entry.name == "latents")
    return its.cache.get("latents", item.keys["latents"][0][0], spec.tensors)


def test_clips_are_cached_and_batched_by_their_frames(tmp_path: Path) -> None:
    its = Its.write("toy-video", tmp_path)
    assert shapes_of(its.prepared) == {"0.png": STILL, "1": CLIP, "2": CLIP, "3": CLIP}
    assert latents_of(its, its.prepared, "1").tensors["latents"].shape[1] == latent_frames(FRAMES) == 2
    assert {batch.tensors["latents"].shape[2] for batch in its.batches(2)} == {1, 2}
    assert its.prepared.facts.bucket_counts == {STILL: 1, CLIP: 3}
    assert largest_of(its.recipe) == CLIP, "memory is counted for clips"


def test_each_frame_that_is_used_is_a_part_of_the_key(tmp_path: Path) -> None:
    its = Its.write("toy-video", tmp_path)
    before = {item.key: item.keys["latents"] for item in its.prepared.items}
    image(tmp_path / "data" / "1" / f"frame_{FRAMES}.png", 64, 64, seed=77)  # is not used
    image(tmp_path / "data" / "2" / f"frame_{FRAMES - 1}.png", 64, 64, seed=77)
    found = prepare(its.recipe, family_for(its.recipe), Encoding(its.cache, CPU))
    assert [item.key for item in found.items if item.keys["latents"] != before[item.key]] == ["2"]


def test_a_damaged_clip_is_made_again(tmp_path: Path) -> None:
    its = Its.write("toy-video", tmp_path)
    (item,) = (item for item in its.prepared.items if item.key == "3")
    key = item.keys["latents"][0][0]
    (path,) = its.cache.root.rglob(f"{key}.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes(8))
    its.prepared.repair("latents", key, "damaged")
    assert path.with_name(f"{path.stem}-1.safetensors").read_bytes() == whole


def test_a_video_is_drawn_from_what_was_trained_on_clips(tmp_path: Path) -> None:
    its = Its.write("toy-video", tmp_path)
    assert start(its.recipe, tmp_path / "run")
    (path,) = preview.existing(RunDir(tmp_path / "run"), 4, its.recipe) or ()
    with Image.open(path) as file:  # equal frames are stored once, and shown as long
        assert file.n_frames == 2 and file.size == (64, 64)
    assert preview.requests_of(its.recipe)[0].to_json()["frames"] == FRAMES
    still = preview.requests_of(its.recipe)[0]
    assert "frames" not in type(still)("a", "", 64, 64, 1, 1.0, 1).to_json()


def test_control_images_keep_their_sizes(tmp_path: Path) -> None:
    its = Its.write("toy-edit", tmp_path)
    wide = {"control_h": 64, "control_w": 64, "h": 64, "w": 64}
    found = shapes_of(its.prepared)
    assert found["1.png"] == found["2.png"] == SampleShape.of(**wide, control_2_h=32, control_2_w=96)
    assert found["0.png"] != found["1.png"] and found["0.png"]["control_2_h"] > found["0.png"]["control_2_w"]
    for batch in its.batches(2):
        for number, name in enumerate(("control", "control_2")):
            sides = batch.tensors[control_latents(number)].shape[-2:]
            assert sides == (batch.shape[f"{name}_h"] // 8, batch.shape[f"{name}_w"] // 8)
    assert control_latents(0) == CONTROL_LATENTS
    assert largest_of(its.recipe) == SampleShape.of(
        h=64, w=64, control_h=64, control_w=64, control_2_h=64, control_2_w=64
    )


def test_control_images_change_prediction_and_preview(tmp_path: Path) -> None:
    its = Its.write("toy-edit", tmp_path)
    adapted, batch = its.adapted(CPU), its.batch
    plain, _ = adapted.passed(batch)
    for number in (0, 1):
        changed = {**batch.tensors, control_latents(number): -batch.tensors[control_latents(number)]}
        seen, _ = adapted.passed(replace(batch, tensors=changed))
        assert not torch.allclose(seen.loss_B, plain.loss_B, rtol=1e-5)
    (request,) = preview.requests_of(its.recipe)
    assert list(request.inputs) == ["control_image", "control_image_2"]
    names = (list(request.inputs), ["control_image"], [])
    drawn = [its.family.preview(adapted.model, [only(request, each)], text_of(its))[0] for each in names]
    assert len({each.tobytes() for each in drawn if isinstance(each, Image.Image)}) == 3


def text_of(its: Its) -> Any:
    def text(prompt: str) -> dict[str, Tensor]:
        return its.prepared.text_lookup(prompt)

    return text


def only(request: PreviewRequest, names: list[str]) -> PreviewRequest:
    return replace(request, inputs={name: request.inputs[name] for name in names})


@pytest.mark.parametrize(
    ("family", "data", "where", "what"),
    [
        ("toy-video", "path: x, frames: 6", "data.frames", worded("families/have-1-and-multiples-of-4-more")),
        ("toy-video", "path: x, frames: [5, 8]", "data.frames", worded("families/and-this-is-8")),
        ("sdxl", "path: x, frames: 5", "data.frames", worded("families/this-key-is-not-read-by-sdxl")),
        (
            "toy-edit",
            "path: x, control_path: [a, b, c]",
            "data.control_path",
            worded("families/takes-only-2-control-images"),
        ),
        ("toy-flow", "path: x, control_path: a", "data.control_path", worded("families/takes-no-control-images")),
        (
            "toy-edit",
            "sources: [{path: x, control_path: [a, b]}, {path: y, control_path: a}]",
            "data.sources",
            worded("families/has-1"),
        ),
    ],
)
def test_what_a_family_does_not_take_is_refused(
    tmp_path: Path, family: str, data: str, where: str, what: Worded
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{family: {family}, name_or_path: x}}\ndata: {{{data}}}\ntrain: {{max_train_steps: 1}}\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(recipe), registry=TOYS)
    (problem,) = caught.value.problems
    assert problem.where.endswith(where) and says(problem.what, what), problem


@pytest.mark.parametrize(
    ("data", "places"),
    [
        ("path: x, frames: 5, mask_path: m", {"data.mask_path"}),
        ("path: x, frames: [1, 5], alpha_mask: true", {"data.alpha_mask"}),
        ("path: x, frames: 5, control_path: c", {"data.control_path"}),
        ("frames: 5, sources: [{path: x, alpha_mask: true}]", {"data.sources[0].alpha_mask"}),
        ("alpha_mask: true, sources: [{path: x, frames: 5}, {path: y}]", {"data.alpha_mask"}),
        ("sources: [{dataset: x, frames: 5}, {path: y}]", {"data.sources[0].frames"}),
        ("frames: 5, sources: [{dataset: x}, {path: y, frames: 1}]", {"data.frames"}),
        ("path: x, alpha_mask: true", set()),
        ("path: x, frames: [1], mask_path: m", set()),
        ("frames: 5, sources: [{path: x}, {path: y, frames: 1, alpha_mask: true}, {dataset: z}]", set()),
    ],
)
def test_clips_have_no_companions_and_datasets_no_clips(tmp_path: Path, data: str, places: set[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{family: toy-video, name_or_path: x}}\ndata: {{{data}}}\ntrain: {{max_train_steps: 1}}\n",
        encoding="utf-8",
    )
    if not places:
        assert load_recipe(str(recipe), registry=TOYS)
        return
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(recipe), registry=TOYS)
    assert {problem.where.rpartition(" ")[2] for problem in caught.value.problems if problem.fix} == places
