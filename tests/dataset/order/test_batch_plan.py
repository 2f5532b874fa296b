import math
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.images.buckets import Geometry, choose_bucket, image_shape
from lora_rocm.dataset.order.batch_plan import BatchPlan, Item, Row
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.foundation.seeds import draw


def item(
    index: int, wide: bool = False, repeats: int = 1, flip: bool = False, texts: int = 1, dropout: float = 0.0
) -> Item:
    shape = choose_bucket(200 if wide else 100, 100, 64, 16, 2.0, True, False).shape
    images = (f"image{index}", f"mirrored{index}") if flip else (f"image{index}",)
    captions = (*(f"text{index}.{n}" for n in range(texts)), "empty")
    keys = {"image": tuple((key,) for key in images), "text": (captions,)}
    return Item(f"{index}.png", shape, keys, len(images), texts, dropout, repeats)


items = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=12).map(
    lambda drawn: [item(index, wide, repeats, True, 3, 0.3) for index, (wide, repeats) in enumerate(drawn)]
)
SIZES = [(64, 64), (64, 128), (128, 64), (32, 256), (4096, 1)]  # some have the same area
GOLDEN = [[(3, 1), (0, 0)], [(5, 1), (1, 0)], [(3, 0)], [(5, 0), (1, 1)], [(4, 0), (2, 0)]]
splits = st.sampled_from([(4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)])


def epoch_of(plan: BatchPlan, epoch: int = 0) -> list[list[Row]]:
    first = epoch * plan.steps_per_epoch
    return [plan.rows(iteration) for iteration in range(first, first + plan.steps_per_epoch)]


@given(items, st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2))
def test_every_image_is_seen_as_often_as_asked(found: list[Item], batch: int, acc: int, seed: int, epoch: int) -> None:
    batches = epoch_of(BatchPlan(found, batch, acc, seed), epoch)
    seen = Counter(row.item.key for rows in batches for row in rows if row.weight > 0)
    assert seen == {one.key: one.repeats for one in found}


def micros_of(plan: BatchPlan, iteration: int) -> list[list[Row]]:
    rows = plan.rows(iteration)
    return [rows[at : at + plan.batch_size] for at in range(0, len(rows), plan.batch_size)]


@given(items, st.integers(1, 5), splits, st.integers(0, 2))
def test_a_micro_batch_has_one_bucket_and_an_update_takes_any(
    found: list[Item], batch: int, split: tuple[int, int, int], epoch: int
) -> None:
    _, acc, world = split
    plan = BatchPlan(found, batch, acc, 0, world)
    first = epoch * plan.steps_per_epoch
    updates = [micros_of(plan, iteration) for iteration in range(first, first + plan.steps_per_epoch)]
    sizes = Counter(one.shape for one in found for _ in range(one.repeats))
    num_micros = sum(-(-count // batch) for count in sizes.values())
    assert plan.steps_per_epoch == -(-num_micros // (acc * world))
    assert [len(micros) for micros in updates[:-1]] == [acc * world] * (len(updates) - 1), "only the last is shorter"
    assert len(updates[-1]) == num_micros - acc * world * (len(updates) - 1), "it never reaches into the next epoch"
    for micros in updates:
        rows = [row for micro in micros for row in micro]
        assert [row.position for row in rows] == list(range(len(rows)))
        assert all(len({row.item.shape for row in micro}) == 1 and micro[0].weight > 0 for micro in micros)
        assert len({row.weight for row in rows if row.weight}) == 1 and abs(sum(row.weight for row in rows) - 1) < 1e-12
    part_filled = [micro for micros in updates for micro in micros if micro[-1].weight == 0.0]
    assert len(part_filled) == len({micro[0].item.shape for micro in part_filled}), "one for each bucket at most"


@given(items, st.integers(1, 5), splits, st.integers(0, 3))
def test_accumulation_and_ranks_do_not_change_the_updates(
    found: list[Item], batch: int, split: tuple[int, int, int], seed: int
) -> None:
    _, acc, world = split
    plans = [BatchPlan(found, batch, acc * world, seed), BatchPlan(found, batch, acc, seed, world)]
    assert epoch_of(plans[0]) == epoch_of(plans[1])


@given(items, st.integers(1, 5), st.integers(1, 2), st.integers(0, 3))
def test_micro_batches_are_those_of_training_without_accumulation(
    found: list[Item], batch: int, epoch: int, seed: int
) -> None:
    """So one micro-batch per update has the order that it always had, in the order of earlier runs, too."""

    def keys(acc: int, earlier: bool = False) -> list[tuple[str, bool]]:
        updates = epoch_of(BatchPlan(found, batch, acc, seed, one_bucket_updates=earlier), epoch)
        return [(row.item.key, row.weight > 0) for rows in updates for row in rows]

    assert keys(1) == keys(3) == keys(1, earlier=True)


@given(items, splits, st.booleans())
def test_ranks_and_micro_batches_partition_the_update(
    found: list[Item], split: tuple[int, int, int], earlier: bool
) -> None:
    batch, acc, world = split
    ranks = [BatchPlan(found, batch, acc, 0, world, rank, one_bucket_updates=earlier) for rank in range(world)]
    for iteration in range(2 * ranks[0].steps_per_epoch):
        slices = [plan.micro(iteration, index) for plan in ranks for index in range(plan.num_micros(iteration))]
        assert all(len(rows) == batch for rows in slices)
        given = [rows for rows in slices if any(row.weight for row in rows)]
        without = [rows for rows in slices if not any(row.weight for row in rows)]
        together = sorted((row for rows in given for row in rows), key=lambda row: row.position)
        assert earlier or together == ranks[0].rows(iteration)
        assert earlier or len(without) == max(0, world - len(given)), "a rank without a micro-batch adds weight 0"
        assert abs(sum(row.weight for rows in slices for row in rows) - 1) < 1e-12


@given(items, splits)
def test_the_micro_batches_of_a_rank_are_numbered_through(found: list[Item], split: tuple[int, int, int]) -> None:
    batch, acc, world = split
    for rank in range(world):
        plan = BatchPlan(found, batch, acc, 0, world, rank)
        places = [(i, index) for i in range(3 * plan.steps_per_epoch) for index in range(plan.num_micros(i))]
        assert [plan.place_of(number) for number in range(len(places))] == places
        assert all(places[plan.first_micro(i)] == (i, 0) for i in range(3 * plan.steps_per_epoch))


def test_ranks_have_about_as_much_to_compute() -> None:
    """Dealt as drawn, one rank would often have several large micro-batches while another has none."""
    shapes = [SampleShape.of(tokens=64 * 2 ** (n % 6)) for n in range(240)]
    ranks = [BatchPlan([Item(str(n), s, {}) for n, s in enumerate(shapes)], 1, 8, 0, 4, rank) for rank in range(4)]

    def cost(plan: BatchPlan, iteration: int) -> int:
        return sum(plan.micro(iteration, index)[0].item.shape.cost for index in range(plan.num_micros(iteration)))

    for iteration in range(ranks[0].steps_per_epoch - 1):
        costs = [cost(plan, iteration) for plan in ranks]
        assert max(costs) < 1.35 * sum(costs) / 4, costs
    drawn = [micro[0].item.shape.cost for micro in micros_of(ranks[0], 0)]
    assert max(sum(drawn[rank::4]) for rank in range(4)) > 1.35 * sum(drawn) / 4, "the control"


@given(items, st.integers(2, 5), st.integers(1, 3))
def test_a_source_with_smaller_batches_has_micro_batches_of_its_own(found: list[Item], batch: int, acc: int) -> None:
    found += [replace(one, key=f"own {one.key}", batch_size=batch - 1) for one in found]
    plan, seen = BatchPlan(found, batch, acc, 0), Counter[str]()
    for iteration in range(plan.steps_per_epoch):
        for rows in micros_of(plan, iteration):
            counted = [row.item for row in rows if row.weight > 0]
            seen.update(one.key for one in counted)
            (size,) = {one.batch_size or batch for one in counted}
            assert len(rows) == batch and len(counted) <= size
        assert abs(sum(row.weight for row in plan.rows(iteration)) - 1) < 1e-9
    assert seen == {one.key: one.repeats for one in found}
    most = Counter((one.shape, one.batch_size) for one in found for _ in range(one.repeats))
    assert plan.steps_per_epoch == -(-sum(-(-count // (size or batch)) for (_, size), count in most.items()) // acc)


MIXED = (
    # (samples of each bucket, batch size, accumulation) -> updates of kohya-ss/sd-scripts, which buckets micro-batches
    # (train_util.BucketManager) and takes ceil(micro-batches / accumulation) of them for an epoch (train_network.py)
    ((9, 7, 6, 5, 4, 3, 2, 2, 1, 1), 1, 8, 5),
    ((4, 3, 1), 1, 8, 1),
    ((5, 3, 1), 2, 2, 3),
)


@pytest.mark.parametrize(("counts", "batch", "acc", "wanted"), MIXED)
def test_an_epoch_of_mixed_buckets_has_as_many_updates_as_elsewhere(
    counts: tuple[int, ...], batch: int, acc: int, wanted: int
) -> None:
    shapes = [SampleShape.of(h=64, w=64 + 64 * n) for n, count in enumerate(counts) for _ in range(count)]
    found = [Item(str(n), shape, {}) for n, shape in enumerate(shapes)]
    assert BatchPlan(found, batch, acc, 0).steps_per_epoch == wanted
    earlier = BatchPlan(found, batch, acc, 0, one_bucket_updates=True)
    assert earlier.steps_per_epoch > wanted, "the control"
    assert BatchPlan(found, batch, acc, 0).one_bucket_steps == earlier.steps_per_epoch == earlier.one_bucket_steps


def test_batches_as_large_as_all_others_are_mixed_with_them() -> None:
    found = [item(index) for index in range(8)]
    asked = [replace(one, batch_size=4 * (index % 2)) for index, one in enumerate(found)]
    keys = [[[row.item.key for row in rows] for rows in epoch_of(BatchPlan(each, 4, 1, 3))] for each in (found, asked)]
    assert keys[0] == keys[1]


def test_a_micro_batch_draws_for_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cost of an update grew with the square of its micro-batches and ranks."""
    plan, drawn = BatchPlan([item(index) for index in range(64)], 2, 8, 0, 4, 1), list[int]()
    row = plan._row
    monkeypatch.setattr(plan, "_row", lambda *where: drawn.append(where[3]) or row(*where))
    for index in range(8):
        plan.micro(0, index)
    assert drawn == [position for position in range(64) if position // 2 % 4 == 1]


def test_order_follows_seed_and_epoch() -> None:
    found = [item(index, wide=index % 2 == 0) for index in range(20)]
    assert epoch_of(BatchPlan(found, 2, 1, 0)) == epoch_of(BatchPlan(found, 2, 1, 0))
    assert epoch_of(BatchPlan(found, 2, 1, 0)) != epoch_of(BatchPlan(found, 2, 1, 1))
    orders = [[row.item.key for rows in epoch_of(BatchPlan(found, 2, 1, 0), epoch) for row in rows] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def area(rows: list[Row]) -> int:
    return rows[0].item.shape.cost


@given(items, st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_the_first_batch_is_of_the_largest_images(found: list[Item], batch: int, acc: int, seed: int) -> None:
    batches = epoch_of(BatchPlan(found, batch, acc, seed))
    assert area(batches[0]) == max(map(area, batches))


Place = tuple[int, int]  # an item's index, and which of its repeats


def plain_order(found: list[Item], size: int, seed: int, epoch: int) -> list[list[Place]]:
    """A plain reference implementation of an epoch: sorted as drawn; only one batch of the first epoch is moved."""
    buckets: dict[tuple[int, int], list[Place]] = {}
    for index, one in enumerate(found):
        buckets.setdefault((one.shape["h"], one.shape["w"]), []).extend(
            (index, repeat) for repeat in range(one.repeats)
        )
    batches = []
    for target_hw, places in buckets.items():
        places.sort(key=lambda place: draw("order", seed, epoch, found[place[0]].key, place[1]))
        starts = range(0, len(places), size)
        batches += [(draw("batch", seed, epoch, *target_hw, at), places[at : at + size], target_hw) for at in starts]
    batches.sort()
    if epoch == 0:
        largest = max(target_hw for *_, target_hw in batches if math.prod(target_hw) == max(map(pixels, batches)))
        batches.insert(0, batches.pop([target_hw for *_, target_hw in batches].index(largest)))
    return [places for _, places, _ in batches]


def pixels(batch: tuple[int, list[Place], tuple[int, int]]) -> int:
    return math.prod(batch[2])


@given(
    st.lists(
        st.tuples(st.text(st.characters(codec=None)), st.sampled_from(SIZES), st.integers(1, 3)),
        min_size=1,
        max_size=20,
        unique_by=lambda drawn: drawn[0],
    ),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 2**64),
    st.integers(0, 1),
)
def test_the_order_is_the_plain_one(
    drawn: list[tuple[str, tuple[int, int], int]], batch: int, acc: int, seed: int, epoch: int
) -> None:
    found = [Item(key, image_shape(size), {}, repeats=n) for key, size, n in drawn]
    assert order_of(BatchPlan(found, batch, acc, seed), epoch) == plain_order(found, batch, seed, epoch)
    earlier = BatchPlan(found, batch, acc, seed, one_bucket_updates=True)
    assert order_of(earlier, epoch) == plain_order(found, batch * acc, seed, epoch)


def order_of(plan: BatchPlan, epoch: int) -> list[list[Place]]:
    return [batch for step in range(plan.steps_per_epoch) for batch in plan._samples(epoch, step)[0]]


def test_the_order_is_the_same_on_every_machine() -> None:
    plan = BatchPlan([item(index, wide=index % 3 == 0, repeats=1 + index % 2) for index in range(6)], 2, 1, 7)
    assert order_of(plan, 1) == GOLDEN


def test_without_items_there_are_no_steps() -> None:
    assert BatchPlan([], 2, 1, 0).steps_per_epoch == 0


def test_an_order_takes_little_memory() -> None:
    """A tuple of two numbers for each sample would take a hundred bytes."""
    shape, count = item(0).shape, 20_000
    found = [Item(f"{index}.png", shape, {}) for index in range(count)]
    tracemalloc.start()
    try:
        plan = BatchPlan(found, 4, 1, 0)
        plan.rows(0)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / count < 64 and most / count < 120, (kept / count, most / count)


def test_without_the_move_a_small_batch_comes_first_in_some_epoch() -> None:
    """Negative control: later epochs are not changed."""
    plan = BatchPlan([item(index, wide=index % 2 == 0) for index in range(20)], 2, 1, 0)
    starts = [area(epoch_of(plan, epoch)[0]) for epoch in range(8)]
    assert starts[0] == max(starts) and len(set(starts)) == 2


def test_going_back_gives_the_same_rows() -> None:
    plan = BatchPlan([item(index) for index in range(5)], 2, 1, 0)
    forward = [plan.rows(iteration) for iteration in range(12)]
    assert [plan.rows(iteration) for iteration in reversed(range(12))] == forward[::-1]
    assert BatchPlan(plan.items, 2, 1, 0).rows(11) == forward[11]


def test_buckets_come_mixed() -> None:
    plan = BatchPlan([item(index, wide=index < 20) for index in range(40)], 2, 1, 0)
    sizes = [rows[0].item.shape for rows in epoch_of(plan)]
    changes = sum(a != b for a, b in zip(sizes, sizes[1:], strict=False))
    assert changes > 4


def test_a_tail_is_filled_with_real_samples_of_no_weight() -> None:
    rows = BatchPlan([item(0), item(1)], 5, 1, 0).rows(0)
    assert [row.weight for row in rows] == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert [row.item for row in rows[2:]] == [rows[0].item, rows[1].item, rows[0].item]


def test_a_weight_is_a_factor_of_the_share_of_its_sample() -> None:
    """As in kohya-ss/sd-scripts train_network.py, where a batch is the mean of weight times loss of its samples."""
    plain = [item(0), item(1)]
    weighted = [plain[0], replace(plain[1], loss_weight=0.25)]
    one, other = (BatchPlan(each, 4, 1, 0).rows(0) for each in (plain, weighted))
    weights = {row.item.key: row.weight for row in other[:2]}
    assert weights == {"0.png": 0.5, "1.png": 0.125} and [row.weight for row in other[2:]] == [0.0, 0.0]
    assert [row.item.key for row in one] == [row.item.key for row in other], "the order stays"


def test_choices_are_drawn_in_their_shares() -> None:
    plan = BatchPlan([item(index, flip=True, texts=4, dropout=0.25) for index in range(200)], 1, 1, 0)
    rows = [rows[0] for epoch in range(5) for rows in epoch_of(plan, epoch)]
    assert 0.45 < sum(row.view for row in rows) / len(rows) < 0.55
    assert 0.20 < sum(row.dropout for row in rows) / len(rows) < 0.30
    assert all(200 < count < 300 for count in Counter(row.variant for row in rows).values())
    first = {row.item.key: row.variant for row in rows[:200]}
    assert any(first[row.item.key] != row.variant for row in rows[200:400])


def test_what_is_not_asked_for_is_not_drawn() -> None:
    rows = [rows[0] for rows in epoch_of(BatchPlan([item(index) for index in range(50)], 1, 1, 0))]
    assert not any(row.view or row.dropout or row.variant for row in rows)
    assert {row.key("text") for row in rows} == {f"text{index}.0" for index in range(50)}


def test_rows_name_their_cache_entries() -> None:
    one = item(0, flip=True, texts=2)
    assert Row(one, 0, 1.0, True, 1, False).key("image") == "mirrored0"
    assert Row(one, 0, 1.0, False, 1, False).key("text") == "text0.1"
    assert Row(one, 0, 1.0, False, 1, True).key("text") == "empty"


def test_two_clips_of_one_size_and_different_lengths_are_in_different_buckets() -> None:
    shapes = [SampleShape.of(frames=frames, h=64, w=64) for frames in (17, 81) for _ in range(4)]
    plan = BatchPlan([Item(str(number), shape, {}) for number, shape in enumerate(shapes)], 4, 1, 0)
    batches = epoch_of(plan)
    assert [{row.item.shape for row in rows} for rows in batches] == [{shapes[7]}, {shapes[0]}]
    alike = [
        Item(str(number), SampleShape.of(h=64, w=64), {}) for number in range(8)
    ]  # the control: stills are one bucket
    assert len({row.item.shape for rows in epoch_of(BatchPlan(alike, 4, 1, 0)) for row in rows}) == 1


def test_the_cost_decides_which_batch_comes_first() -> None:
    cheap, dear = SampleShape.of(h=640, w=640), SampleShape.of(10**9, tokens=4)
    found = [Item(str(number), dear if number == 3 else cheap, {}) for number in range(8)]
    assert BatchPlan(found, 1, 1, 0).rows(0)[0].item.shape == dear


def test_an_entry_of_an_image_and_a_caption_is_chosen_by_both() -> None:
    keys = {"pair": (("0a", "0b", "0"), ("1a", "1b", "1")), "image": (("0",), ("1",))}
    one = Item("0", SampleShape.of(h=8, w=8), keys, 2, 2, 0.5)
    assert [Row(one, 0, 1.0, flip, 1, False).key("pair") for flip in (False, True)] == ["0b", "1b"]
    assert Row(one, 0, 1.0, True, 0, True).key("pair") == "1" == Row(one, 0, 1.0, True, 0, True).key("image")


def test_samples_of_other_shares_have_them_in_the_loss() -> None:
    """The weights of an update add up to one, and each is proportional to the share, however it is cut."""
    items = [Item(f"{n}", SampleShape.of(tokens=4), {}, share=share) for n, share in enumerate((1, 2, 5))]
    whole = BatchPlan(items, 3, 1, 0).rows(0)
    assert {row.item.key: row.weight for row in whole} == pytest.approx({"0": 1 / 8, "1": 2 / 8, "2": 5 / 8})
    cut = BatchPlan(items, 1, 3, 0)
    rows = [row for micro in range(3) for row in cut.micro(0, micro)]
    assert {row.item.key: row.weight for row in rows} == {row.item.key: row.weight for row in whole}
    same = [Item(f"{n}", SampleShape.of(tokens=4), {}) for n in range(3)]
    assert {row.weight for row in BatchPlan(same, 3, 1, 0).rows(0)} == {1 / 3}


def test_each_view_is_drawn_and_has_its_crop() -> None:
    places = [Geometry((64, 64), (64, 80), (0, left), (64, 64)) for left in (0, 5, 9, 16)]
    keys = {"image": tuple((f"image{number}",) for number in range(4)), "text": (("text", "empty"),)}
    one = Item("0.png", places[0].shape, keys, num_views=4, geometry=places[0], crops=tuple(places))
    plan = BatchPlan([one], 1, 1, 0)
    rows = [plan.rows(number)[0] for number in range(200)]
    assert all(30 < count < 70 for count in Counter(row.view for row in rows).values())
    assert all(row.key("image") == f"image{row.view}" and row.geometry == places[row.view] for row in rows)
    alike = Item("0.png", places[0].shape, keys, num_views=4, geometry=places[1])
    assert Row(alike, 0, 1.0, 3, 0, False).geometry == places[1], "views that are cut alike have one crop"


LENGTHS = (32, 64, 96)
long_items = st.lists(
    st.tuples(st.booleans(), st.integers(1, 2), st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=4)),
    min_size=1,
    max_size=30,
).map(
    lambda drawn: [
        replace(item(n, wide, repeats, texts=len(lengths) - 1, dropout=0.3), lengths=tuple(lengths))
        for n, (wide, repeats, lengths) in enumerate(drawn)
    ]
)


def length_of(row: Row) -> int:
    """The length of the caption that a row has."""
    return row.item.lengths[-1 if row.dropout else row.variant]


def micro_batches(plan: BatchPlan, epoch: int = 0) -> list[list[Row]]:
    """The micro-batches of an epoch; without those that only fill up, or are filled up."""
    found = []
    for rows in epoch_of(plan, epoch):
        parts = [rows[at : at + plan.batch_size] for at in range(0, len(rows), plan.batch_size)]
        found += [part for part in parts if all(row.weight for row in part)]
    return found


def pure(batches: list[list[Row]]) -> int:
    return sum(len({length_of(row) for row in rows}) == 1 for rows in batches)


@given(long_items, st.sampled_from([(2, 1, 1), (3, 1, 1), (2, 2, 2)]), st.integers(0, 3), st.integers(0, 2))
def test_as_many_micro_batches_as_possible_have_texts_of_one_length(
    found: list[Item], split: tuple[int, int, int], seed: int, epoch: int
) -> None:
    size, acc, world = split
    plan = BatchPlan(found, size, acc, seed, world)
    batches = epoch_of(plan, epoch)
    assert Counter(row.item.key for rows in batches for row in rows if row.weight) == {i.key: i.repeats for i in found}
    groups = Counter((row.item.shape, length_of(row)) for rows in batches for row in rows if row.weight)
    assert pure(micro_batches(plan, epoch)) >= sum(count // size for count in groups.values())


def of_lengths(count: int) -> list[Item]:
    return [replace(item(n, n % 4 == 0), lengths=(32 + 32 * (n % 5), 32)) for n in range(count)]


def test_without_lengths_most_micro_batches_are_mixed() -> None:
    """The control of the test above."""
    ordered, mixed = (micro_batches(BatchPlan(of_lengths(100), 4, 1, 0, by_length=how)) for how in (True, False))
    assert (pure(ordered), len(ordered)) == (20, 24) and pure(mixed) < 3


def test_texts_of_one_length_and_batches_of_one_keep_their_order() -> None:
    for size, lengths in ((1, True), (2, False), (4, False)):
        found = of_lengths(50) if lengths else [replace(one, lengths=(64, 64)) for one in of_lengths(50)]
        plans = [BatchPlan(found, size, 2, 3, by_length=by_length) for by_length in (True, False)]
        assert epoch_of(plans[0]) == epoch_of(plans[1]) and epoch_of(plans[0], 1) == epoch_of(plans[1], 1)


def test_which_samples_of_one_length_go_together_is_drawn_anew() -> None:
    plan = BatchPlan(of_lengths(200), 2, 2, 0)
    epochs = [micro_batches(plan, epoch) for epoch in range(3)]
    pairs = [{frozenset(row.item.key for row in rows) for rows in batches} for batches in epochs]
    assert all(len(one & other) < 10 for one, other in ((pairs[0], pairs[1]), (pairs[1], pairs[2])))
    lengths = [[length_of(rows[0]) for rows in batches] for batches in epochs]
    assert sum(a != b for a, b in zip(lengths[0], lengths[0][1:], strict=False)) > 50, "lengths come mixed"
    assert sum(a != b for a, b in zip(lengths[0][::2], lengths[0][1::2], strict=False)) > 20, "in an update, too"
    assert micro_batches(BatchPlan(of_lengths(200), 2, 2, 0), 2) == epochs[2], "a resumed run has the same"
