"""Samples and items in columns have the same values as the objects."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, Pad, TensorSpec
from lora_rocm.dataset.order.batch_plan import Item, outline_of
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.dataset.sources.scan import geometry_of, scan
from lora_rocm.encoded_cache.image_preprocess import ImageEntry, LookupResult
from lora_rocm.encoded_cache.item_table import (
    ANY_SHAPE,
    AXES,
    CUT,
    Items,
    KeyLists,
    UsableSamples,
    check_table,
    identity,
)
from lora_rocm.loader.batches import BatchPlan

BOTH = (EntrySpec("image", (IMAGE,), {}, True), EntrySpec("text", (CAPTION,), {}))


def key_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@pytest.fixture
def usable(tmp_path: Path, make: SimpleNamespace) -> UsableSamples:
    return usable_of(tmp_path, make, flip_aug=True)


def usable_of(tmp_path: Path, make: SimpleNamespace, flip_aug: bool) -> UsableSamples:
    for index in range(4):
        make.image(tmp_path / "data" / f"{index}.png", 96 + 32 * index, 64, seed=index, caption=f"a, {index}")
    data = make.data(path=str(tmp_path / "data"), flip_aug=flip_aug, repeats=3)
    samples = scan(data).samples.at([0, 2, 3])
    return UsableSamples.unfilled(samples, ["image"], axes_of([geometry_of(sample, data) for sample in samples]))


def axes_of(cuts: Any) -> dict[str, Any]:
    heights, widths = zip(*(cut.target_hw for cut in cuts), strict=True)
    crops = [(*cut.resized_hw, *cut.crop_top_left) for cut in cuts]
    return {name: np.array(rows, np.int32) for name, rows in ((CUT, crops), ("axis h", heights), ("axis w", widths))}


def items_of(
    usable: UsableSamples, places: list[int], captions: dict[str, KeyLists], entries: Any, held_out: bool = False
) -> Items:
    lists = {f"key {name}": keys for name, keys in captions.items()}
    table = usable.ordered(np.array(places)).table(entries, lists)
    return Items(table, usable.samples.sources, entries, held_out)


def looked_at(usable: UsableSamples, place: int, in_tiles: bool) -> LookupResult:
    entries = [
        ImageEntry(view, None, key_of(place, view.flip), key_of(place, view.flip, "tiles"), in_tiles=in_tiles)
        for view in usable[place].views
    ]
    return LookupResult(hashlib.sha256(bytes([place])).hexdigest(), tuple(entries))


def test_a_sample_is_found_again_whole(usable: UsableSamples) -> None:
    assert len(usable) == 3 and [wanted.sample.key for wanted in usable] == ["0.png", "2.png", "3.png"]
    assert (
        list(usable.ready) == [] and usable[2].sha256 == "" and [view.flip for view in usable[2].views] == [False, True]
    )
    usable.found(2, "image", looked_at(usable, 2, in_tiles=False))
    usable.found(0, "image", looked_at(usable, 0, in_tiles=True))
    assert list(usable.ready) == [0, 2] and usable[2].sha256 == hashlib.sha256(b"\2").hexdigest()
    assert usable[2].geometry.original_hw == (64, 192) and usable.shape(2) == usable[2].geometry.shape
    assert usable[-1] == usable[2] and usable[1:] == [usable[1], usable[2]]


@pytest.mark.parametrize("held_out", [False, True])
def test_an_item_is_that_of_the_object(usable: UsableSamples, held_out: bool) -> None:
    for place in range(3):
        usable.found(place, "image", looked_at(usable, place, in_tiles=place == 0))
    captions = KeyLists()
    for place in (0, 2):
        captions.append([*(key_of("text", place, n) for n in range(place + 1)), key_of("empty")])
    items = items_of(usable, [0, 2], {"text": captions}, BOTH, held_out)
    count = 1 if held_out else 2
    whole = tuple(
        Item(
            key=f"{name}.png",
            shape=usable[place].geometry.shape,
            keys={
                "image": tuple(
                    (key_of(place, flip, *(["tiles"] if place == 0 else [])),) for flip in (False, True)[:count]
                ),
                "text": ((*(key_of("text", place, n) for n in range(place + 1)), key_of("empty")),),
            },
            num_views=count,
            num_captions=place + 1,
            dropout_rate=0.0,
            repeats=1 if held_out else 3,
            geometry=usable[place].geometry,
            content=(
                tuple(key_of(place, flip) for flip in (False, True)[:count]),
                (*(key_of("text", place, n) for n in range(place + 1)), key_of("empty")),
            ),
        )
        for place, name in ((0, 0), (2, 3))
    )
    assert items == whole and len(items) == 2 and items[1] == whole[1] and items[-1] != whole[0]
    for field in fields(Item):
        assert getattr(items[0], field.name) == getattr(whole[0], field.name)
    assert identity(items) == identity(whole) != identity(whole[::-1])
    said = repr([(item.key, item.repeats, item.content) for item in whole])
    assert identity(items) == hashlib.sha256(said.encode("utf-8")).hexdigest(), "checkpoints have this one"
    rows, expected = (BatchPlan(source, 2, 1, seed=3).rows(0) for source in (items, whole))
    assert rows == expected
    outline, expected_outline = outline_of(items), outline_of(whole)
    assert list(outline.keys) == list(outline.keys) == expected_outline.keys
    shapes, expected_shapes = ([o.shapes[number] for number in o.shape_N] for o in (outline, expected_outline))
    assert shapes == expected_shapes
    assert outline.repeats_N.tolist() == expected_outline.repeats_N.tolist()


@pytest.mark.parametrize("flip_aug", [False, True])
def test_an_item_has_as_many_views_as_its_source_asks_for(
    tmp_path: Path, make: SimpleNamespace, flip_aug: bool
) -> None:
    usable = usable_of(tmp_path, make, flip_aug)
    usable.found(1, "image", looked_at(usable, 1, in_tiles=False))
    (item,) = items_of(usable, [1], {}, BOTH[:1])
    expected = tuple(key_of(1, flip) for flip in (False, True)[: 1 + flip_aug])
    assert item.keys == {"image": tuple((key,) for key in expected)} and item.content == (expected,)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_source_may_have_a_batch_size(tmp_path: Path, make: SimpleNamespace, held_out: bool) -> None:
    for name in ("few", "many"):
        make.image(tmp_path / name / "0.png", 64, 64, caption="a")
    data = make.data(sources=[{"path": str(tmp_path / "few"), "max_batch_size": 1}, {"path": str(tmp_path / "many")}])
    usable = UsableSamples.unfilled(scan(data).samples)
    items = items_of(usable, [0, 1], {}, (), held_out)
    assert [item.batch_size for item in items] == [0 if held_out else 1, 0]
    assert outline_of(items).batch_N.tolist() == [item.batch_size for item in items]
    assert [item.content for item in items] == [() if held_out else (("batch size 1",),), ()], "a resume sees a change"
    assert BatchPlan(items, 2, 1, 0).steps_per_epoch == (1 if held_out else 2)


def test_an_entry_of_images_and_captions_has_a_key_for_each_pair(usable: UsableSamples) -> None:
    both = EntrySpec("pair", (IMAGE, CAPTION), {})
    usable.found(0, "image", looked_at(usable, 0, in_tiles=False))
    keys = KeyLists()
    keys.append([key_of(view, caption) for view in range(2) for caption in ("a", "b", "")])
    (item,) = items_of(usable, [0], {"pair": keys}, [BOTH[0], both])
    assert item.num_views == 2 and item.num_captions == 2
    assert item.keys["pair"] == tuple(tuple(key_of(view, caption) for caption in ("a", "b", "")) for view in range(2))


def test_samples_whose_images_are_not_read_lie_in_one_bucket(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = usable_of(tmp_path, make, flip_aug=False).samples
    usable = UsableSamples.unfilled(samples)
    assert list(usable.ready) == [0, 1, 2] and usable.shape(0) == ANY_SHAPE
    items = items_of(usable, [0, 2], {"text": keys_of(2)}, BOTH[1:])
    assert items[0].geometry is None and items.outline().shapes == [ANY_SHAPE] == [items[1].shape]


def keys_of(count: int) -> KeyLists:
    keys = KeyLists()
    for _ in range(count):
        keys.append([key_of("text"), key_of("empty")])
    return keys


def test_a_plan_makes_the_items_of_a_batch_only(usable: UsableSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a million are made at every start."""
    made = list[int]()
    items, make = items_of(usable, [0, 1, 2], {"text": keys_of(3)}, BOTH), Items._made
    monkeypatch.setattr(Items, "_made", lambda self, *at: made.extend(range(*at)) or make(self, *at))
    rows = BatchPlan(items, 2, 1, seed=3).rows(0)
    assert len(rows) == len(made) == 2
    outline_of(list(items))
    assert len(made) == 5, "a list of them is made, and that is counted"


def test_a_table_is_the_samples_that_were_put_into_it(usable: UsableSamples) -> None:
    for place in range(3):
        usable.found(place, "image", looked_at(usable, place, in_tiles=False))
    again = UsableSamples.of_table(usable.table(BOTH, {"key text": keys_of(3)}), usable.samples.sources)
    assert list(again) == list(usable) and again.sha256(1) == hashlib.sha256(b"\1").hexdigest()


def test_axes_that_a_sample_has_are_its_shape(tmp_path: Path, make: SimpleNamespace) -> None:
    """A still of 64x96 and a clip with it, and texts of two lengths, which differ in nothing but their axes."""
    samples = usable_of(tmp_path, make, flip_aug=False).samples
    columns = {"h": [64, 64, 0], "w": [96, 96, 0], "frames": [0, 5, 0], "tokens": [0, 0, 96]}
    axes = {f"axis {name}": np.array(rows, np.int32) for name, rows in columns.items()}
    usable = UsableSamples.unfilled(samples, axes=axes)
    usable.counted(2, 64, 7)
    assert list(columns) == list(AXES)
    wanted = [SampleShape.of(h=64, w=96), SampleShape.of(h=64, w=96, frames=5), SampleShape.of(tokens=64)]
    assert [usable.shape(index) for index in range(3)] == wanted
    items = items_of(usable, [2, 0, 1], {"text": keys_of(3)}, BOTH[1:])
    outline = items.outline()
    assert [outline.shapes[number] for number in outline.shape_N] == [wanted[2], *wanted[:2]]
    assert [item.shape for item in items] == [wanted[2], *wanted[:2]] and outline.shapes == [wanted[2], *wanted[:2]]
    assert outline.share_N.tolist() == [item.share for item in items] == [7, 1, 1]
    again = UsableSamples.of_table(items.batch, samples.sources)
    assert [again.shape(index) for index in range(3)] == [wanted[2], *wanted[:2]]


MASKED = EntrySpec("text", (CAPTION,), {"mask": TensorSpec("bool", "S", Pad("S"), if_padded=True)})


def with_lengths(usable: UsableSamples, lengths: tuple[tuple[int, ...], ...]) -> Any:
    """The table of all samples, with captions of these lengths."""
    column = KeyLists()
    for row in lengths:
        column.append_lengths(row)
    return usable.table((BOTH[0], MASKED), {"key text": keys_of(3), "length text": column})


def test_lengths_of_captions_are_in_the_table_if_their_batches_may_need_a_mask(usable: UsableSamples) -> None:
    for place in range(3):
        usable.found(place, "image", looked_at(usable, place, in_tiles=False))
    table = with_lengths(usable, ((32, 8), (70_000, 8), (64, 8)))
    check_table(table, (BOTH[0], MASKED), usable.samples.sources)
    rows = table.slice(1)  # as those that are held out
    items = Items(rows, usable.samples.sources, (BOTH[0], MASKED))
    assert [item.lengths for item in items] == [(70_000, 8), (64, 8)]
    found, wanted = items.outline().texts, outline_of(list(items)).texts
    assert found is not None and wanted is not None and found.length_L.tolist() == wanted.length_L.tolist()
    assert found.count_N.tolist() == [2, 2] and found.dropout_N.tolist() == wanted.dropout_N.tolist()
    plain = items_of(usable, [1, 2], {"text": keys_of(2)}, BOTH)
    assert plain.outline().texts is None and plain[0].lengths == () and identity(plain) == identity(items)


def test_a_table_without_a_length_for_each_key_is_refused(usable: UsableSamples) -> None:
    for place in range(3):
        usable.found(place, "image", looked_at(usable, place, in_tiles=False))
    with pytest.raises(ValueError, match="lengths differ"):
        check_table(with_lengths(usable, ((32, 8), (64,), (64, 8))), (BOTH[0], MASKED), usable.samples.sources)
