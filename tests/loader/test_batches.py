import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_rocm.device.transfer import fingerprint
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import DataError, StorageError
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import BatchPlan, Prepared, loader, open_workers, prepare
from lora_rocm.loader.worker_pool import LoaderWorkers
from lora_rocm.recipe.process_sections import RuntimeSection
from tests.supervisor.fake_run import listening

CPU = torch.device("cpu")
RUNTIME = RuntimeSection()


@pytest.fixture
def ready(tmp_path: Path, make: SimpleNamespace, family: Any) -> Iterator[SimpleNamespace]:
    for index in range(7):
        size = (96, 64) if index < 4 else (64, 96)
        make.image(tmp_path / "data" / f"{index}.png", *size, seed=index, caption=f"{index}, a, b, c")
    data = make.data(
        path=str(tmp_path / "data"), flip_aug=True, shuffle_caption=True, caption_dropout_rate=0.3, repeats=2
    )
    cache = LatentCache(tmp_path / "cache")
    prepared: Prepared = prepare(make.recipe(data), family, Encoding(cache, CPU))
    plan = BatchPlan(prepared.items, 2, 2, 0)

    def load(start: int, count: int | None, plan: BatchPlan = plan, **keys: Any) -> Any:
        workers = open_workers(cache, prepared.entries, keys.pop("runtime", RUNTIME), listening(said))
        opened.append(workers)
        return loader(plan, family, workers, start, count, **{"repair": prepared.repair, **keys})

    said: list[str] = []
    opened: list[LoaderWorkers] = []
    yield SimpleNamespace(said=said, cache=cache, prepared=prepared, plan=plan, family=family, load=load)
    for workers in opened:
        workers.close()


def same(one: list[Batch], other: list[Batch]) -> bool:
    """Whether two lists of batches are equal bit for bit."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        plain = ("sample_keys", "positions", "shape", "iteration", "micro")
        if any(getattr(a, name) != getattr(b, name) for name in plain) or a.tensors.keys() != b.tensors.keys():
            return False
        if not all(
            torch.equal(getattr(a, part)[name], getattr(b, part)[name])
            for part in ("tensors", "fingerprints")
            for name in getattr(a, part)
        ):
            return False
    return True


def entry_of(ready: SimpleNamespace, kind: str, key: str) -> Path:
    (path,) = ready.cache.root.glob(f"{kind}/*/{key}.safetensors")
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def test_a_batch(ready: SimpleNamespace) -> None:
    batches = list(ready.load(0, ready.plan.steps_per_epoch))
    places = list(itertools.product(range(4), (0, 1)))[:-1]  # 8 and 6 samples: the last update has one micro-batch
    assert [(b.iteration, b.micro) for b in batches] == places
    assert [b.is_last for b in batches] == [False, True, False, True, False, True, True]
    for batch in batches:
        rows = ready.plan.micro(batch.iteration, batch.micro)
        tensors = batch.tensors
        assert set(tensors) == {"latent_mean", "latent_std", "embeds", "token_ids", "time_ids", "weight"}
        assert set(batch.fingerprints) == set(tensors)
        for name, tensor in tensors.items():
            assert tensor.shape[0] == 2 and tensor.is_contiguous()
            assert torch.equal(batch.fingerprints[name], fingerprint(tensor))
        assert tensors["weight"].dtype == torch.float32 and tensors["weight"].tolist() == pytest.approx(
            [row.weight for row in rows]
        )
        geometry = rows[0].item.geometry
        assert str(batch.shape) == "{1}x{0}".format(*geometry.target_hw)
        assert geometry.target_hw == tuple(tensors["time_ids"][0, 4:].tolist())
        assert tensors["time_ids"][0].tolist() == [*geometry.original_hw, *geometry.crop_top_left, *geometry.target_hw]
        assert batch.sample_keys == tuple(row.item.key for row in rows)
        assert batch.positions == tuple(row.position for row in rows)


def test_the_tensors_are_those_of_the_rows(ready: SimpleNamespace) -> None:
    for batch in ready.load(0, 4):
        for place, row in enumerate(ready.plan.micro(batch.iteration, batch.micro)):
            image = ready.cache.get("image", row.key("image"), ready.family.image_encoder.entry.tensors)
            text = ready.cache.get("text", row.key("text"), ready.family.text_encoder.entry.tensors)
            for name, tensor in (image.tensors | text.tensors).items():
                assert torch.equal(batch.tensors[name][place], tensor)


def test_starting_anywhere_gives_the_same_batches(ready: SimpleNamespace) -> None:
    whole = list(ready.load(0, 9))
    assert same(whole[7:], list(ready.load(4, 5)))
    assert same(whole[7:13], list(itertools.islice(ready.load(4, None), 6)))
    assert not same(whole[:2], list(ready.load(1, 1)))


def test_ranks_and_splits_read_the_same_samples(ready: SimpleNamespace) -> None:
    items = ready.plan.items

    def samples(batch_size: int, accumulation: int, world: int) -> list[tuple[int, int, str, float]]:
        found = []
        for rank in range(world):
            for batch in ready.load(0, 4, BatchPlan(items, batch_size, accumulation, 0, world, rank)):
                weights = batch.tensors["weight"].tolist()
                rows = zip([batch.iteration] * batch_size, batch.positions, batch.sample_keys, weights, strict=True)
                found += [row for row in rows if row[3]]
        return sorted(found)

    assert samples(1, 4, 1) == samples(1, 2, 2) == samples(1, 1, 4)
    assert samples(2, 2, 1) == samples(2, 1, 2) != samples(1, 2, 2)


def test_the_global_generator_is_left_alone(ready: SimpleNamespace) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(ready.load(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_entry_is_made_again_and_the_batches_are_the_same(ready: SimpleNamespace) -> None:
    whole = list(ready.load(0, 4))
    row = ready.plan.micro(1, 1)[0]
    damage(entry_of(ready, "image", row.key("image")))
    damage(entry_of(ready, "text", row.key("text")))
    loads = ready.family.image_encoder.loads
    assert same(list(ready.load(0, 4)), whole)
    assert ready.family.image_encoder.loads == loads + 1
    assert len(list(ready.cache.root.rglob("*-1.safetensors"))) == 2


def test_a_missing_entry_is_made_again(ready: SimpleNamespace) -> None:
    whole = list(ready.load(0, 2))
    entry_of(ready, "image", ready.plan.micro(0, 1)[0].key("image")).unlink()
    assert same(list(ready.load(0, 2)), whole)


def test_an_entry_that_stays_bad_is_the_machines_fault(ready: SimpleNamespace) -> None:
    damage(entry_of(ready, "image", ready.plan.micro(0, 0)[0].key("image")))
    asked = []
    with pytest.raises(StorageError) as caught:
        list(ready.load(0, 1, repair=lambda kind, key, reason: asked.append((kind, key))))
    assert caught.value.code == "cache-entry-damaged" and len(asked) == 1


def test_without_repair_a_damaged_entry_is_named(ready: SimpleNamespace) -> None:
    path = entry_of(ready, "image", ready.plan.micro(0, 0)[0].key("image"))
    damage(path)
    with pytest.raises(DataError) as caught:
        list(ready.load(0, 1, repair=None))
    assert str(path) in caught.value.where and "Delete" in caught.value.fix


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_give_the_same_batches_and_repair(ready: SimpleNamespace, persistent: bool) -> None:
    whole = list(ready.load(0, 4))
    damage(entry_of(ready, "image", ready.plan.micro(2, 1)[0].key("image")))
    runtime = RuntimeSection(workers=2, worker_timeout_s=60, persistent_workers=persistent)
    assert same(list(ready.load(0, 4, runtime=runtime)), whole)
    assert len(list(ready.cache.root.rglob("*-1.safetensors"))) == 1 and ready.said == []


def test_pinning(ready: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    list(ready.load(0, 1))
    assert pinned == []
    list(ready.load(0, 1, pin_memory=True))
    assert len(pinned) == 12
