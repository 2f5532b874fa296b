"""Control images as cache entries: encoded like images, cut and mirrored with their image, keyed by content."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from lora_rocm.dataset.companions.controls import CONTROL
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.controls import CONTROL_ENTRY, control_encoders
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import Prepared, prepare
from lora_rocm.errors import DataError
from lora_rocm.families.objectives.base import CONTROL_LATENTS, MEAN
from lora_rocm.loader.batches import BatchPlan, loader, open_workers
from lora_rocm.recipe.process_sections import RuntimeSection
from tests.fake_encoders import FakeEncoder, FakeFamily
from tests.wording import saying, says

CPU = torch.device("cpu")


class World:
    """Two images of 96x64 with control images, and runs over them."""

    def __init__(self, root: Path, make: SimpleNamespace) -> None:
        self.root, self.make, self.cache = root, make, LatentCache(root / "cache")
        self.keys: dict[str, Any] = {"path": str(root / "data"), "control_path": str(root / "controls")}
        self.family = FakeFamily()
        for number in range(2):
            make.image(root / "data" / f"{number}.png", seed=number, caption=f"{number}")
            make.image(root / "controls" / f"{number}.png", seed=9 + number)

    def recipe(self) -> Any:
        model = {"family": "flux", "name_or_path": "x", "variant": "kontext"}
        return self.make.recipe(self.make.data(**self.keys), model=model)

    def prepare(self) -> Prepared:
        return prepare(self.recipe(), self.family, Encoding(self.cache, CPU))  # type: ignore[arg-type]

    def entry(self, prepared: Prepared, number: int, view: int = 0) -> Tensor:
        key = prepared.items[number].keys[CONTROL][view][0]
        return self.cache.get(CONTROL, key, CONTROL_ENTRY.tensors).tensors[CONTROL_LATENTS]

    def image_entry(self, prepared: Prepared, number: int, view: int = 0) -> Tensor:
        spec = self.family.image_encoder.entry
        return self.cache.get("image", prepared.items[number].keys["image"][view][0], spec.tensors).tensors[MEAN]

    def copy(self, to: int) -> None:
        """The control image of a sample becomes its image."""
        path = self.root / "controls" / f"{to}.png"
        path.write_bytes((self.root / "data" / f"{to}.png").read_bytes())


@pytest.fixture
def world(tmp_path: Path, make: SimpleNamespace) -> World:
    return World(tmp_path, make)


def control_files(world: World) -> list[Path]:
    return sorted((world.root / "cache" / CONTROL).rglob("*.safetensors"))


def test_a_control_image_is_cut_mirrored_and_encoded_as_its_image(world: World) -> None:
    """So a copy of the image gives the image's latents, in both views; another image, the control, gives others."""
    world.keys["flip_aug"] = True
    world.copy(0)
    prepared = world.prepare()
    for view in (0, 1):
        assert torch.equal(world.entry(prepared, 0, view), world.image_entry(prepared, 0, view))
        assert not torch.equal(world.entry(prepared, 1, view), world.image_entry(prepared, 1, view))
    assert not torch.equal(world.entry(prepared, 0, 0), world.entry(prepared, 0, 1))


def test_a_control_image_of_another_size_covers_the_bucket_without_being_stretched(world: World) -> None:
    """Twice as wide, it is cut at both sides; half as large, it is enlarged."""
    with Image.open(world.make.image(world.root / "data" / "0.png", 64, 64)) as image:
        wide = Image.new("RGB", (128, 64), "red")
        wide.paste(image, (32, 0))
        wide.save(world.root / "controls" / "0.png")
    world.make.image(world.root / "controls" / "1.png", 48, 32)
    prepared = world.prepare()
    assert torch.equal(world.entry(prepared, 0), world.image_entry(prepared, 0))
    assert world.entry(prepared, 1).shape == world.image_entry(prepared, 1).shape


def test_batches_have_the_control_images_of_their_samples(world: World) -> None:
    prepared = world.prepare()
    plan, workers = BatchPlan(prepared.items, 2, 1, 0), open_workers(world.cache, prepared.entries, RuntimeSection())
    (batch,) = loader(plan, world.family, workers, 0, 1)  # type: ignore[arg-type]
    wanted = {item.key: world.entry(prepared, number) for number, item in enumerate(prepared.items)}
    found = dict(zip(batch.sample_keys, batch.tensors[CONTROL_LATENTS], strict=True))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_entries_are_made_by_content(world: World) -> None:
    before = world.prepare()
    assert len(control_files(world)) == 2 and world.family.image_encoder.loads == 2, "for controls, and for images"
    assert world.prepare().identity() == before.identity() and world.family.image_encoder.loads == 2
    kept = (world.root / "controls" / "0.png").read_bytes()
    world.make.image(world.root / "controls" / "0.png", seed=77)
    after = world.prepare()
    assert after.items[0].keys["image"] == before.items[0].keys["image"]
    assert after.items[0].keys[CONTROL] != before.items[0].keys[CONTROL] and after.identity() != before.identity()
    (world.root / "controls" / "0.png").write_bytes(kept)
    assert world.prepare().identity() == before.identity() and len(control_files(world)) == 3
    (world.root / "controls" / "1.png").write_bytes(kept)
    shared = world.prepare().items
    assert shared[0].keys[CONTROL] == shared[1].keys[CONTROL], "one file, one entry"


def test_the_hash_of_a_sample_stays_that_of_its_image(world: World) -> None:
    world.keys["validation_split"] = 0.5
    held = [item.key for item in world.prepare().held_out]
    for number in (0, 1):
        world.make.image(world.root / "controls" / f"{number}.png", seed=50 + number)
    assert [item.key for item in world.prepare().held_out] == held


def test_a_damaged_entry_is_made_again_from_its_file(world: World) -> None:
    prepared = world.prepare()
    (path,) = world.cache.root.rglob(f"{prepared.items[1].keys[CONTROL][0][0]}.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes(8))
    prepared.repair(CONTROL, prepared.items[1].keys[CONTROL][0][0], "damaged")
    assert path.with_name(f"{path.stem}-1.safetensors").read_bytes() == whole
    world.make.image(world.root / "controls" / "1.png", seed=77)
    with pytest.raises(DataError, check=saying("encoded_cache/has-changed-since-the-run-began")):
        prepared.repair(CONTROL, prepared.items[1].keys[CONTROL][0][0], "damaged")


def test_a_file_that_breaks_after_the_scan_sets_its_image_aside(world: World) -> None:
    path = world.root / "controls" / "0.png"
    world.make.spoil(path)
    prepared = world.prepare()
    (problem,) = prepared.set_aside
    assert [item.key for item in prepared.items] == ["1.png"]
    assert problem.where.endswith("0.png") and says(problem.what, "encoded_cache/control-image-of-0-png-cannot-be")


def test_a_control_image_that_does_not_fit_is_encoded_in_tiles(world: World) -> None:
    whole = world.prepare().items
    encoder = world.family.image_encoder
    encoder.tiled = FakeEncoder(encoder.entry, "tiled", encoder.tensors_of)

    def full(pixels_CHW: Tensor) -> Any:
        raise torch.OutOfMemoryError("HIP out of memory.")

    encoder.tensors_of = full
    world.cache = LatentCache(world.root / "other cache")
    tiled = world.prepare()
    assert world.entry(tiled, 0).isfinite().all() and len(encoder.tiled.encoded) == 4
    assert {item.keys[CONTROL] for item in whole}.isdisjoint(item.keys[CONTROL] for item in tiled.items)


def test_without_control_images_there_is_no_entry(world: World) -> None:
    del world.keys["control_path"]
    assert not control_encoders(world.recipe(), world.family.encoders())  # type: ignore[arg-type]
    assert CONTROL not in world.prepare().items[0].keys and not control_files(world)
