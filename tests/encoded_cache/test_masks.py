"""Masks as cache entries: keyed by content, on the grid of the latents, mixed with images without any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lora_rocm.dataset.companions.masks import MASK
from lora_rocm.dataset.order.batch_plan import BatchPlan
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.masks import MASK_ENTRY, mask_encoder
from lora_rocm.encoded_cache.prepare import Prepared, prepare
from lora_rocm.errors import DataError
from lora_rocm.families.objectives.loss import LOSS_MASK, LOSS_WEIGHTS
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import loader, open_workers
from lora_rocm.recipe.process_sections import RuntimeSection
from tests.fake_encoders import FakeFamily
from tests.wording import saying, says

CPU = torch.device("cpu")


class World:
    """Three images of 64x64, two of them with masks, and runs over them."""

    def __init__(self, root: Path, make: SimpleNamespace) -> None:
        self.root, self.make = root, make
        self.keys: dict[str, Any] = {"path": str(root / "data"), "mask_path": str(root / "masks")}
        (root / "masks").mkdir()
        for number in range(3):
            make.image(root / "data" / f"{number}.png", 64, 64, seed=number, caption=f"{number}")
        self.paint(0, slice(0, 32), slice(0, 32))
        self.paint(1, slice(0, 64), slice(0, 12))
        self.cache = LatentCache(root / "cache")

    def paint(self, number: int, rows: slice, columns: slice) -> None:
        """A mask that is white in a rectangle."""
        mask_HW = np.zeros((64, 64), dtype=np.uint8)
        mask_HW[rows, columns] = 255
        Image.fromarray(mask_HW).save(self.root / "masks" / f"{number}.png")

    def prepare(self, **how: Any) -> Prepared:
        recipe = self.make.recipe(self.make.data(**self.keys))
        return prepare(recipe, FakeFamily(), Encoding(self.cache, CPU, **how))  # type: ignore[arg-type]

    def batches(self, prepared: Prepared, batch_size: int) -> list[Batch]:
        plan, family = BatchPlan(prepared.items, batch_size, 1, 0), FakeFamily()
        workers = open_workers(self.cache, prepared.entries, RuntimeSection(workers=0))
        found = list(loader(plan, family, workers, 0, plan.steps_per_epoch, repair=prepared.repair))  # type: ignore[arg-type]
        workers.close()
        return found

    def masks(self, batch_size: int = 1, name: str = LOSS_MASK) -> dict[str, Tensor]:
        """The mask of each sample in its batch."""
        batches = self.batches(self.prepare(), batch_size)
        return {
            key: mask_CHW
            for batch in batches
            for key, mask_CHW in zip(batch.sample_keys, batch.tensors[name], strict=True)
        }


@pytest.fixture
def world(tmp_path: Path, make: SimpleNamespace) -> World:
    return World(tmp_path, make)


def mask_files(world: World) -> list[Path]:
    return sorted((world.root / "cache" / MASK).rglob("*.safetensors"))


def test_masks_lie_on_the_grid_of_the_latents(world: World) -> None:
    masks = world.masks()
    assert all(mask.shape == (1, 8, 8) and mask.dtype == torch.float32 for mask in masks.values())
    wanted_HW = torch.zeros(8, 8)
    wanted_HW[:4, :4] = 1.0
    assert torch.equal(masks["0.png"][0], wanted_HW)
    assert torch.equal(masks["1.png"][0, 3], torch.tensor([1.0, 0.5, 0, 0, 0, 0, 0, 0]))
    assert torch.equal(masks["2.png"], torch.ones(1, 8, 8)), "an image without a mask counts whole"


def test_a_batch_of_masked_and_unmasked_images_is_their_singles(world: World) -> None:
    singles, together = world.masks(1), world.masks(3)
    assert singles.keys() == together.keys() == {"0.png", "1.png", "2.png"}
    assert all(torch.equal(singles[key], together[key]) for key in singles)


def test_without_masks_there_is_no_entry(world: World) -> None:
    del world.keys["mask_path"]
    prepared = world.prepare()
    assert MASK not in prepared.items[0].keys and not mask_files(world)
    assert all(LOSS_MASK not in batch.tensors for batch in world.batches(prepared, 2))
    assert mask_encoder(world.make.recipe(world.make.data(**world.keys))) is None


def test_the_mirrored_view_has_the_mirrored_mask(world: World) -> None:
    world.keys["flip_aug"] = True
    prepared = world.prepare()
    (plain,), (mirrored,) = prepared.items[0].keys[MASK]
    found = [world.cache.get(MASK, key, MASK_ENTRY.tensors).tensors[LOSS_MASK] for key in (plain, mirrored)]
    assert torch.equal(found[1], found[0].flip(-1)) and not torch.equal(found[1], found[0])


def test_entries_are_made_by_content(world: World) -> None:
    before, identity = world.prepare().items, world.prepare().identity()
    assert len(mask_files(world)) == 3
    world.make.image(world.root / "data" / "3.png", 64, 64, seed=3, caption="3")
    world.prepare()
    assert len(mask_files(world)) == 3, "images without a mask share an entry"
    (world.root / "data" / "3.png").unlink()
    world.paint(0, slice(0, 32), slice(0, 40))
    after = world.prepare()
    assert len(mask_files(world)) == 4
    assert after.items[0].keys[MASK] != before[0].keys[MASK] and after.items[0].keys["image"] == before[0].keys["image"]
    assert after.identity() != identity, "another mask is other data"
    world.paint(0, slice(0, 32), slice(0, 32))
    assert world.prepare().identity() == identity


def test_the_hash_of_a_sample_stays_that_of_its_image(world: World) -> None:
    """It decides the held-out images, and which images are copies."""
    world.keys["validation_split"] = 0.4
    masked = world.prepare()
    del world.keys["mask_path"]
    plain = world.prepare()
    assert [item.key for item in masked.held_out] == [item.key for item in plain.held_out]
    assert LOSS_MASK in MASK_ENTRY.tensors and MASK in masked.held_out[0].keys


def test_a_mask_that_is_black_sets_its_image_aside(world: World) -> None:
    world.paint(0, slice(0, 0), slice(0, 0))
    prepared = world.prepare()
    assert [item.key for item in prepared.items] == ["1.png", "2.png"]
    (problem,) = prepared.set_aside
    assert says(problem.what, "encoded_cache/the-mask-of-0-png-leaves-nothing") and "masks" in problem.where


def test_a_mask_that_lost_its_pixels_sets_its_image_aside(world: World) -> None:
    path = world.root / "masks" / "0.png"
    path.write_bytes(path.read_bytes()[:60])
    (problem,) = world.prepare().set_aside
    assert says(problem.what, "encoded_cache/the-mask-of-0-png-cannot-be") and problem.where.endswith("0.png")


def test_a_damaged_entry_is_made_again(world: World) -> None:
    prepared = world.prepare()
    wanted = world.masks()
    for path in mask_files(world):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    found = {key: mask for batch in world.batches(prepared, 1) for key, mask in _rows(batch)}
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for path in mask_files(world):
        path.unlink()
    world.paint(0, slice(0, 64), slice(0, 64))
    with pytest.raises(DataError, check=saying("encoded_cache/has-changed-since-the-run-began")):
        world.batches(prepared, 1)


def _rows(batch: Batch) -> list[tuple[str, Tensor]]:
    return list(zip(batch.sample_keys, batch.tensors[LOSS_MASK], strict=True))


def test_alpha_is_a_mask_of_its_own(world: World) -> None:
    """The same file as a mask and by its alpha channel is not the same entry."""
    pixels_HWC = np.full((64, 64, 4), 255, dtype=np.uint8)
    pixels_HWC[:, 32:, 3] = 0
    pixels_HWC[32:, :, :3] = 0
    for name in ("data/0.png", "masks/0.png"):
        Image.fromarray(pixels_HWC).save(world.root / name)
    by_file = world.masks()["0.png"]
    del world.keys["mask_path"]
    world.keys["alpha_mask"] = True
    by_alpha = world.masks()
    left_HW = torch.tensor([1.0] * 4 + [0.0] * 4).repeat(8, 1)
    assert torch.equal(by_alpha["0.png"][0], left_HW)
    assert torch.equal(by_file[0], left_HW * left_HW.T)
    assert torch.equal(by_alpha["1.png"], torch.ones(1, 8, 8))


def test_what_is_outside_of_a_mask_may_count_in_part(world: World) -> None:
    """Nerogar/OneTrainer modules/util/loss/masked_loss.py: the reduced mask is limited from below."""
    plain = world.masks()
    world.keys["unmasked_weight"] = 0.1
    found = world.masks()
    assert plain.keys() == found.keys() and plain["0.png"].min() == 0
    assert all(torch.equal(mask_CHW, plain[key].clamp(min=0.1)) for key, mask_CHW in found.items())
    world.paint(0, slice(0, 0), slice(0, 0))
    assert world.masks()["0.png"].unique().tolist() == [pytest.approx(0.1)], "an image with a black mask is used then"


def test_masks_that_the_loss_is_not_divided_by_have_another_name(world: World) -> None:
    plain = world.masks()
    world.keys["normalize_masked_area_loss"] = False
    found = world.masks(name=LOSS_WEIGHTS)
    assert plain.keys() == found.keys() and all(torch.equal(found[key], plain[key]) for key in plain)
    assert all(LOSS_MASK not in batch.tensors for batch in world.batches(world.prepare(), 1))


def test_views_that_differ_in_colours_share_a_mask(world: World) -> None:
    world.keys |= {"color_aug": 2}
    (item, *_) = world.prepare().items
    assert len(item.keys["image"]) == 3 == len({key for (key,) in item.keys["image"]})
    masks = [key for (key,) in item.keys[MASK]]
    assert len(masks) == 3 and len(set(masks)) == 1
