"""Pictures and items in columns say what the objects would."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lora_rocm.data.batches import BatchPlan
from lora_rocm.data.columns import Keys
from lora_rocm.data.items import Items, Pictures, identity
from lora_rocm.data.plan import Item, outline_of
from lora_rocm.data.ready import Entry, Looked
from lora_rocm.data.samples import geometry_of, scan


def key_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@pytest.fixture
def pictures(tmp_path: Path, make: SimpleNamespace) -> Pictures:
    return pictures_of(tmp_path, make, flip_aug=True)


def pictures_of(tmp_path: Path, make: SimpleNamespace, flip_aug: bool) -> Pictures:
    for index in range(4):
        make.picture(tmp_path / "data" / f"{index}.png", 96 + 32 * index, 64, seed=index, caption=f"a, {index}")
    data = make.data(path=str(tmp_path / "data"), flip_aug=flip_aug, repeats=3)
    samples = scan(data).samples
    made = Pictures(samples)
    for index, sample in enumerate(samples):
        if index != 1:
            made.append(index, geometry_of(sample, data))
    return made


def looked_at(pictures: Pictures, place: int, in_tiles: bool) -> Looked:
    picture = pictures[place]
    entries = []
    for flip in picture.flips:
        plain, tiled = key_of(place, flip), key_of(place, flip, "tiles")
        job: Any = SimpleNamespace(key=plain, tiled_key=tiled, geometry=picture.geometry)
        entries.append(Entry(job, tiled if in_tiles else plain, ""))
    return Looked(hashlib.sha256(bytes([place])).hexdigest(), tuple(entries))


def test_a_picture_is_found_again_whole(pictures: Pictures) -> None:
    assert len(pictures) == 3 and [p.sample.key for p in pictures] == ["0.png", "2.png", "3.png"]
    assert list(pictures.ready) == [] and pictures[2].sha256 == "" and pictures[2].flips == (False, True)
    pictures.found(2, looked_at(pictures, 2, in_tiles=False))
    pictures.found(0, looked_at(pictures, 0, in_tiles=True))
    assert list(pictures.ready) == [0, 2] and pictures[2].sha256 == hashlib.sha256(b"\2").hexdigest()
    assert pictures[2].geometry.original_hw == (64, 192) and pictures.shape(2) == pictures[2].geometry.shape
    assert pictures[-1] == pictures[2] and pictures[1:] == [pictures[1], pictures[2]]


@pytest.mark.parametrize("held_out", [False, True])
def test_an_item_is_that_of_the_object(pictures: Pictures, held_out: bool) -> None:
    for place in range(3):
        pictures.found(place, looked_at(pictures, place, in_tiles=place == 0))
    texts = Keys()
    for place in (0, 2):
        texts.append([key_of("text", place, n) for n in range(place + 1)])
    items = Items(pictures, (0, 2), texts, key_of("empty"), held_out)
    count = 1 if held_out else 2
    whole = tuple(
        Item(
            key=f"{name}.png",
            geometry=pictures[place].geometry,
            image_keys=tuple(key_of(place, flip, *(["tiles"] if place == 0 else [])) for flip in (False, True)[:count]),
            text_keys=tuple(key_of("text", place, n) for n in range(place + 1)),
            dropout_key=key_of("empty"),
            dropout_rate=0.0,
            repeats=1 if held_out else 3,
            picture_keys=tuple(key_of(place, flip) for flip in (False, True)[:count]),
        )
        for place, name in ((0, 0), (2, 3))
    )
    assert items == whole and len(items) == 2 and items[1] == whole[1] and items[-1] != whole[0]
    for field in fields(Item):
        assert getattr(items[0], field.name) == getattr(whole[0], field.name)
    assert identity(items) == identity(whole) != identity(whole[::-1])
    said = repr([(item.key, item.repeats, item.picture_keys, item.text_keys) for item in whole])
    assert identity(items) == hashlib.sha256(said.encode("utf-8")).hexdigest(), "checkpoints have this one"
    rows, expected = (BatchPlan(source, 2, 1, seed=3).rows(0) for source in (items, whole))
    assert rows == expected
    outline, expected_outline = outline_of(items), outline_of(whole)
    assert list(outline.keys) == list(outline.keys) == expected_outline.keys
    shapes, expected_shapes = ([o.shapes[number] for number in o.shape_N] for o in (outline, expected_outline))
    assert shapes == expected_shapes
    assert outline.repeats_N.tolist() == expected_outline.repeats_N.tolist()


@pytest.mark.parametrize("flip_aug", [False, True])
def test_an_item_has_as_many_entries_as_were_found(tmp_path: Path, make: SimpleNamespace, flip_aug: bool) -> None:
    pictures = pictures_of(tmp_path, make, flip_aug)
    pictures.found(1, looked_at(pictures, 1, in_tiles=False))
    (item,) = Items(pictures, (1,), Keys(), key_of("empty"))
    assert item.image_keys == item.picture_keys == tuple(key_of(1, flip) for flip in (False, True)[: 1 + flip_aug])


def test_a_plan_makes_the_items_of_a_batch_only(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a million are made at every start."""
    texts, made = Keys(), list[int]()
    for _ in range(3):
        texts.append([key_of("text")])
    items, make = Items(pictures, (0, 1, 2), texts, key_of("empty")), Items._made
    monkeypatch.setattr(Items, "_made", lambda self, index: made.append(index) or make(self, index))
    rows = BatchPlan(items, 2, 1, seed=3).rows(0)
    assert len(rows) == len(made) == 2
    outline_of(list(items))
    assert len(made) == 5, "a list of them is made, and that is counted"
