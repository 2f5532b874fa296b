"""Inpainting bases: the UNet's input is the input in diffusers' pipeline for inpainting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLInpaintPipeline
from PIL import Image
from torch import Tensor

from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.images.views import ImageView
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding, plain_placement
from lora_rocm.encoded_cache.inpainting import INPAINT_ENTRY, HiddenWanted
from lora_rocm.encoded_cache.prepare import prepare
from lora_rocm.errors import DataError, ModelError
from lora_rocm.families.base import PreviewRequest, family_for
from lora_rocm.families.common.unet.inpainting import FIRST_LAYER, config_changes, require_masks_read, seen_and_hidden
from lora_rocm.families.objectives.base import HIDDEN_MASK, SEEN_LATENTS
from lora_rocm.loader.batches import BatchPlan, loader, open_workers
from lora_rocm.model_files.models import pipeline_of
from lora_rocm.recipe.sample_section import SampleSection
from tests.tiny_models import SHALLOW, tiny_recipe, write_tiny_sdxl
from tests.wording import saying

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers, about NumPy
CPU = torch.device("cpu")
SIDE_PX = 64


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {**SHALLOW, "unet": {**SHALLOW["unet"], "in_channels": 9}}
    return write_tiny_sdxl(tmp_path_factory.mktemp("paint") / "model", **model)


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    return StableDiffusionXLInpaintPipeline.from_pretrained(base, local_files_only=True, add_watermarker=False)


def write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(2):
        for name, shape in (("images", (SIDE_PX, SIDE_PX, 3)), ("masks", (SIDE_PX, SIDE_PX))):
            (folder / name).mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / name / f"{number}.png")


def entries(base: Path, folder: Path, **data: Any) -> tuple[Any, Any, Any, list[dict[str, Tensor]]]:
    recipe = tiny_recipe(
        base, data={"path": str(folder / "images"), "flip_aug": True, **data}, cache={"dir": str(folder / "cache")}
    )
    family, cache = family_for(recipe), LatentCache(folder / "cache")
    prepared = prepare(recipe, family, Encoding(cache, CPU))
    keys = [item.keys["hidden"][view][0] for item in prepared.items for view in range(2)]
    return recipe, family, prepared, [cache.get("hidden", key, INPAINT_ENTRY.tensors).tensors for key in keys]


@pytest.mark.slow
def test_the_unet_is_given_what_the_pipeline_gives_it(base: Path, pipeline: Any, tmp_path: Path) -> None:
    write_images(tmp_path)
    recipe, family, prepared, found = entries(base, tmp_path, mask_path=str(tmp_path / "masks"))
    for place, tensors in enumerate(found):
        image, mask = (Image.open(tmp_path / name / f"{place // 2}.png") for name in ("images", "masks"))
        if place % 2:  # the mirrored view
            image, mask = (each.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for each in (image, mask))
        pixels = pipeline.image_processor.preprocess(image, SIDE_PX, SIDE_PX)
        hidden = pipeline.mask_processor.preprocess(mask, SIDE_PX, SIDE_PX)
        with torch.no_grad():
            seen = pipeline.vae.encode(pixels * (hidden < 0.5)).latent_dist.mean
        small, _ = pipeline.prepare_mask_latents(hidden, None, 1, SIDE_PX, SIDE_PX, torch.float32, CPU, None, False)
        assert torch.equal(tensors[HIDDEN_MASK], small[0])
        torch.testing.assert_close(tensors[SEEN_LATENTS], seen[0], rtol=1e-4, atol=1e-5)
    # A step
    plan = BatchPlan(prepared.items, 2, 1, 0)
    workers = open_workers(LatentCache(tmp_path / "cache"), prepared.entries, recipe.runtime)
    (batch,) = loader(plan, family, workers, 0, 1)
    model = family.load(torch.float32, CPU)
    draws = family.objective.draw(batch.tensors, [1, 2]).tensors
    with torch.no_grad():
        ours = family.predict(model, batch.tensors, draws)
        noisy, _ = family.objective.noised(batch.tensors, draws)
        given = torch.cat([noisy, batch.tensors[HIDDEN_MASK], batch.tensors[SEEN_LATENTS] * 0.13025], dim=1)
        conditioning = family.conditioning(model, batch.tensors)
        theirs = pipeline.unet(given, draws["timesteps"], **conditioning).sample
    torch.testing.assert_close(ours.prediction, theirs, rtol=1e-4, atol=1e-5)
    shapes = {name: tensor.shape for name, tensor in family.example(batch.shape, 2).items()}
    assert all(shapes[name] == batch.tensors[name].shape for name in (HIDDEN_MASK, SEEN_LATENTS))


def test_without_masks_each_image_has_one_of_its_own() -> None:
    geometry, whole, shares = Geometry((64, 96), (64, 96), (0, 0), (64, 96)), 0, set[float]()
    image = Image.new("RGB", (96, 64), "white")
    for number in range(60):
        source: Any = SimpleNamespace(key=f"{number}.png", width=96, height=64, given=SimpleNamespace(crop=None))
        plain, mirrored = (
            HiddenWanted(source, geometry, drawn=True).tensor(image, ImageView(flip=flip)) for flip in (False, True)
        )
        assert torch.equal(plain[-1], HiddenWanted(source, geometry, drawn=True).tensor(image, ImageView())[-1])
        assert torch.equal(mirrored[-1], plain[-1].flip(1)), "an image and its mirror image hide the same"
        assert torch.equal(plain[0], 1 - plain[-1]), "what is hidden is grey"
        shares.add(float(plain[-1].mean()))
        whole += bool(plain[-1].all())
    assert len(shares) > 30 and min(shares) > 1 / 20 and 5 < whole < 25
    parts = {
        HiddenWanted(SimpleNamespace(key=key, given=SimpleNamespace(crop=None)), geometry, drawn=True).parts(
            "x", ImageView()
        )
        for key in "abcd"
    }  # type: ignore[arg-type]
    assert len(parts) > 1, "another mask is another entry"


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_preview_is_the_pipeline_s_image_of_a_hidden_one(base: Path, pipeline: Any, guidance: float) -> None:
    request = PreviewRequest("a red cat", "dog", 64, 48, 2, guidance, 7)
    family = family_for(tiny_recipe(base))
    encoders = [encoder.load(plain_placement(CPU)) for encoder in family.encoders()[1:]]
    model = family.load(torch.float32, CPU)

    def text(prompt: str) -> dict[str, Tensor]:
        return {name: tensor for encode in encoders for name, tensor in encode({CAPTION: prompt}).items()}

    (ours,) = family.preview(model, [request], text)
    with torch.no_grad():
        grey = pipeline.vae.encode(torch.zeros(1, 3, 48, 64)).latent_dist.mean * 0.13025  # it would draw from it
    theirs = by_diffusers(pipeline, request, grey, torch.zeros(1, 3, 48, 64), torch.ones(1, 1, 48, 64))
    assert isinstance(ours, Image.Image) and apart(ours, theirs) <= 1
    assert not model.components["unet"]._forward_pre_hooks


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_preview_of_an_own_image_is_the_pipeline_s(
    base: Path, pipeline: Any, tmp_path: Path, guidance: float
) -> None:
    """The files have twice the size of the preview."""
    image, mask = picture_and_mask(tmp_path)
    whole = PreviewRequest("a red cat", "dog", 64, 48, 2, guidance, 7)
    asked = replace(whole, inputs={"control_image": tmp_path / "image.png", "mask": tmp_path / "mask.png"})
    family = family_for(tiny_recipe(base))
    encoders = [encoder.load(plain_placement(CPU)) for encoder in family.encoders()[1:]]
    model = family.load(torch.float32, CPU)

    def text(prompt: str) -> dict[str, Tensor]:
        return {name: tensor for encode in encoders for name, tensor in encode({CAPTION: prompt}).items()}

    ours, plain = family.preview(model, [asked, whole], text)  # one batch, two inputs
    (alone,) = family.preview(model, [asked], text)
    seen, hidden = image.resize((64, 48), Image.Resampling.LANCZOS), mask.resize((64, 48), Image.Resampling.NEAREST)
    hidden_BCHW = pipeline.mask_processor.preprocess(hidden, 48, 64)
    with torch.no_grad():
        pixels = pipeline.image_processor.preprocess(seen, 48, 64) * (hidden_BCHW < 0.5)
        shown = pipeline.vae.encode(pixels).latent_dist.mean * 0.13025  # it would draw from it
    theirs = by_diffusers(pipeline, asked, shown, seen, hidden)
    assert apart(ours, theirs) <= 1 and apart(ours, alone) <= 1
    assert apart(plain, theirs) > 3, "the control: all hidden"
    Image.fromarray(255 - np.asarray(mask)).save(tmp_path / "mask.png")
    (other,) = family.preview(model, [asked], text)
    assert apart(other, theirs) > 3, "the control: another mask"


def picture_and_mask(folder: Path) -> tuple[Image.Image, Image.Image]:
    """Files of 128 x 96 pixels: an image of squares, and a mask in its left half."""
    rng = np.random.default_rng(1)
    image = Image.fromarray(np.kron(rng.integers(0, 256, (6, 8, 3), np.uint8), np.ones((16, 16, 1), np.uint8)))
    mask = Image.fromarray(np.repeat(np.repeat(np.eye(2, dtype=np.uint8) * 255, 48, 0), 64, 1))
    image.save(folder / "image.png")
    mask.save(folder / "mask.png")
    return image, mask


def by_diffusers(pipeline: Any, request: PreviewRequest, shown_BCHW: Tensor, image: Any, mask: Any) -> Any:
    """The pipeline's image for the same start. ``shown_BCHW``: latents of the part that is not masked."""
    return pipeline(
        masked_image_latents=shown_BCHW,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        image=image,
        mask_image=mask,
        height=request.height,
        width=request.width,
        strength=1.0,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        latents=torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(request.seed)),
    ).images[0]


def apart(first: Any, second: Any) -> int:
    """The largest difference of two images, in steps of 255."""
    return int(abs(np.asarray(first).astype(int) - np.asarray(second).astype(int)).max())


def test_what_is_shown_of_an_own_image(tmp_path: Path) -> None:
    image, mask = picture_and_mask(tmp_path)
    asked = PreviewRequest(
        "", "", 64, 64, 1, 1.0, 0, {"control_image": tmp_path / "image.png", "mask": tmp_path / "mask.png"}
    )
    pixels_CHW, hidden_1HW = seen_and_hidden(asked)  # cropped at the centre: 96 of 128 columns
    assert pixels_CHW.shape == (3, 64, 64) and set(hidden_1HW.unique().tolist()) == {0.0, 1.0}
    assert hidden_1HW[0, :32, :32].all() and hidden_1HW[0, 32:, 32:].all() and 0.49 < float(hidden_1HW.mean()) < 0.52
    assert not (pixels_CHW * hidden_1HW).any(), "what is hidden is grey"
    assert pixels_CHW[:, 40, 5].tolist() == pytest.approx([v / 127.5 - 1 for v in image.getpixel((23, 60))], abs=0.05)
    mask.resize((128, 64)).save(tmp_path / "mask.png")
    with pytest.raises(DataError, check=saying("families/128x64-and-the-image-is-128x96")):
        seen_and_hidden(asked)
    (tmp_path / "mask.png").write_bytes(b"")
    with pytest.raises(DataError, check=saying("families/a-mask-cannot-be-read")):
        seen_and_hidden(asked)


def test_masks_are_refused_for_another_base() -> None:
    sample = SampleSection.model_validate({"prompts": ["a", {"prompt": "b", "control_image": "i", "mask": "m"}]})
    require_masks_read(9, sample)
    require_masks_read(4, sample.only(["a"]))
    with pytest.raises(ModelError, check=saying("families/takes-4-channels")) as caught:
        require_masks_read(4, sample)
    assert caught.value.where == "sample.prompts[1].mask"


def test_a_file_says_it_by_its_first_layer() -> None:
    assert config_changes({}, {FIRST_LAYER: (320, 9, 3, 3)}) == {"in_channels": 9}
    assert config_changes({}, {FIRST_LAYER: (320, 4, 3, 3)}) == config_changes({}, {}) == {}
    for name, families in (("StableDiffusionXLInpaint", ("sdxl",)), ("StableDiffusionInpaint", ("sd15", "sd2"))):
        row = pipeline_of(f"{name}Pipeline")
        assert row is not None and row.families == families
