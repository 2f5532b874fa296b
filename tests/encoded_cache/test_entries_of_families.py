"""Families that cache more than one image and one caption, or less: no image, three entries, padded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.dataset.entry_spec import CAPTION, IMAGE, EntrySpec, Pad, TensorSpec
from lora_rocm.device.transfer import fingerprint
from lora_rocm.encoded_cache import manifest
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.item_table import ANY_SHAPE
from lora_rocm.errors import DataError, MachineError
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import BatchPlan, Prepared, loader, open_workers, prepare
from lora_rocm.loader.cached_dataset import together
from lora_rocm.recipe.process_sections import RuntimeSection
from tests.fake_encoders import FakeEncoder, FakeFamily, latents_of, spoil_image
from tests.supervisor.fake_run import listening
from tests.wording import saying

CPU = torch.device("cpu")
STATES = TensorSpec("float32", "SD", Pad("S"))
MASK = TensorSpec("int64", "S", Pad("S"))


def states_of(caption: str) -> dict[str, Tensor]:
    """One state a word: captions of different lengths, and a mask of ones."""
    words = torch.tensor([float(len(word)) for word in ("start", *caption.split())])
    return {"states": words[:, None].repeat(1, 3), "mask": torch.ones(len(words), dtype=torch.int64)}


def text_encoder() -> FakeEncoder:
    return FakeEncoder(EntrySpec("words", (CAPTION,), {"states": STATES, "mask": MASK}), "words-1", states_of)


def pair_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {"seen": inputs[IMAGE].mean(dim=(1, 2)) + float(len(inputs[CAPTION]))}


def pair_encoder() -> FakeEncoder:
    entry = EntrySpec("pair", (IMAGE, CAPTION), {"seen": TensorSpec("float32", "C")})
    return FakeEncoder(entry, "pair-1", pair_of)


class Toy(FakeFamily):
    """A family with these encoders."""

    def __init__(self, *encoders: FakeEncoder) -> None:
        super().__init__()
        self.made = list(encoders)

    def encoders(self) -> list[FakeEncoder]:
        return self.made


class World:
    """A folder of images and captions, and runs over it."""

    def __init__(self, root: Path, make: SimpleNamespace) -> None:
        self.root, self.make, self.keys = root, make, dict[str, Any]()
        for index, caption in enumerate(("a", "a b", "a b c d", "e f g")):
            make.image(root / "data" / f"{index}.png", 64, 64, seed=index, caption=caption)
        self.cache, self.notices = LatentCache(root / "cache"), list[str]()

    def prepare(self, family: Toy, **how: Any) -> Prepared:
        data = self.make.data(path=str(self.root / "data"), **self.keys)
        recipe = self.make.recipe(data, sample={"prompts": ["a prompt of five words"]})
        return prepare(recipe, family, Encoding(self.cache, CPU, context=listening(self.notices), **how))  # type: ignore[arg-type]

    def batches(self, family: Toy, prepared: Prepared, batch_size: int, count: int | None = None) -> Iterator[Batch]:
        plan = BatchPlan(prepared.items, batch_size, 1, 0)
        workers = open_workers(self.cache, prepared.entries, RuntimeSection())
        yield from loader(plan, family, workers, 0, count or plan.steps_per_epoch, repair=prepared.repair)  # type: ignore[arg-type]
        workers.close()


@pytest.fixture
def world(tmp_path: Path, make: SimpleNamespace) -> World:
    return World(tmp_path, make)


def damage(root: Path, key: str) -> Path:
    (path,) = root.rglob(f"{key}.safetensors")
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    return path


def test_a_family_that_reads_no_image(world: World) -> None:
    spoil_image(world.root / "data" / "3.png")  # never decoded
    family = Toy(text_encoder())
    prepared = world.prepare(family)
    assert [item.shape for item in prepared.items] == [ANY_SHAPE] * 4 and prepared.set_aside == ()
    assert prepared.items[0].geometry is None and set(prepared.items[0].keys) == {"words"}
    assert sorted(path.name for path in world.cache.root.iterdir() if path.is_dir()) == ["words"]
    batches = list(world.batches(family, prepared, 2))
    assert [set(batch.tensors) for batch in batches] == [{"states", "mask", "weight"}] * 2
    assert sorted(key for batch in batches for key in batch.sample_keys) == [f"{n}.png" for n in range(4)]
    assert prepared.text_lookup("a prompt of five words")["states"].shape == (6, 3)
    loads = family.made[0].loads
    assert world.prepare(family).identity() == prepared.identity() and family.made[0].loads == loads


def test_without_images_samples_are_held_out_by_their_captions(world: World) -> None:
    world.keys = {"validation_split": 0.5}
    prepared = world.prepare(Toy(text_encoder()))
    assert len(prepared.items) + len(prepared.held_out) == 4 and prepared.held_out


def three() -> Toy:
    images = {"latent_mean": TensorSpec("float32", "CHW"), "latent_std": TensorSpec("float32", "CHW")}
    vae = FakeEncoder(EntrySpec("latents", (IMAGE,), images, True), "vae-1", latents_of)
    return Toy(vae, text_encoder(), pair_encoder())


def test_a_family_with_three_entries(world: World) -> None:
    world.keys = {"flip_aug": True, "shuffle_caption": False, "caption_dropout_rate": 0.5}
    family = three()
    prepared = world.prepare(family)
    item = prepared.items[1]
    assert {name: (len(grid), len(grid[0])) for name, grid in item.keys.items()} == {
        "latents": (2, 1),
        "words": (1, 2),
        "pair": (2, 2),
    }
    assert [len(encoder.encoded) for encoder in family.made] == [8, 6, 16]  # words: 4, the empty one, the prompt
    seen = {(row.view, row.dropout) for rows in map(BatchPlan(prepared.items, 1, 1, 0).rows, range(80)) for row in rows}
    assert len(seen) == 4, "each view with each caption"
    plan = BatchPlan(prepared.items, 1, 1, 0)
    for batch in world.batches(family, prepared, 1, 16):
        (row,) = plan.rows(batch.iteration)
        pixels = next(
            p
            for p in family.made[0].encoded
            if torch.equal(latents_of(p)["latent_mean"], batch.tensors["latent_mean"][0])
        )
        caption = "" if row.dropout else prepared.samples[int(row.item.key[0])].caption
        assert torch.equal(batch.tensors["seen"][0], pair_of({IMAGE: pixels, CAPTION: caption})["seen"])


def test_each_entry_of_three_is_repaired(world: World) -> None:
    family = three()
    prepared = world.prepare(family)
    whole = list(world.batches(family, prepared, 2))
    for name, grid in prepared.items[2].keys.items():
        damage(world.cache.root / name, grid[0][0])
    again = list(world.batches(family, prepared, 2))
    assert all(torch.equal(a.tensors[n], b.tensors[n]) for a, b in zip(whole, again, strict=True) for n in a.tensors)
    assert len(list(world.cache.root.rglob("*-1.safetensors"))) == 3


def test_encoders_are_in_memory_one_at_a_time(world: World) -> None:
    family, alive, most = three(), set[str](), list[int]()
    for encoder in family.made:

        class Weights:
            def __init__(self, name: str) -> None:
                self.name = name
                alive.add(name)
                most.append(len(alive))

            def __del__(self) -> None:
                alive.discard(self.name)

        def load(door: Any, load: Any = encoder.load, name: str = encoder.entry.name) -> Any:
            encode, weights = load(door), Weights(name)
            return lambda inputs: encode(inputs) if weights else {}

        encoder.load = load  # type: ignore[method-assign]
    world.prepare(family)
    assert most == [1, 1, 1] and not alive


def singles(world: World, family: Toy, prepared: Prepared) -> dict[str, Batch]:
    return {batch.sample_keys[0]: batch for batch in world.batches(family, prepared, 1)}


def test_captions_of_different_lengths_make_a_padded_batch_that_is_its_samples(world: World) -> None:
    family = Toy(text_encoder())
    prepared = world.prepare(family)
    alone = singles(world, family, prepared)
    (batch,) = world.batches(family, prepared, 4)
    assert batch.tensors["states"].shape == (4, 5, 3)
    for row, key in enumerate(batch.sample_keys):
        one, length = alone[key].tensors, int(batch.tensors["mask"][row].sum())
        assert torch.equal(batch.tensors["states"][row, :length], one["states"][0])
        assert not batch.tensors["states"][row, length:].any() and length == one["mask"].numel()
    for name, tensor in batch.tensors.items():
        assert torch.equal(batch.fingerprints[name], fingerprint(tensor)) and tensor.is_contiguous()


def test_a_mask_of_the_padding_is_left_out_where_there_is_none(world: World) -> None:
    family, spec = Toy(text_encoder()), replace(MASK, if_padded=True)
    family.made[0].entry = EntrySpec("words", (CAPTION,), {"states": STATES, "mask": spec})
    prepared = world.prepare(family)
    (batch,) = world.batches(family, prepared, 4)
    assert "mask" in batch.tensors and "mask" in batch.fingerprints and not batch.tensors["mask"].all()
    for one in world.batches(family, prepared, 1):
        assert set(one.tensors) == {"states", "weight"} == set(one.fingerprints)


def test_padding_changes_nothing_that_a_mask_hides(world: World) -> None:
    family = Toy(text_encoder())
    prepared = world.prepare(family)
    (batch,) = world.batches(family, prepared, 4)

    def mean(one: Batch) -> Tensor:
        mask_BS1 = one.tensors["mask"][:, :, None]
        return (one.tensors["states"] * mask_BS1).sum(1) / mask_BS1.sum(1)

    alone = singles(world, family, prepared)
    torch.testing.assert_close(mean(batch), torch.cat([mean(alone[key]) for key in batch.sample_keys]))
    without_mask = batch.tensors["states"].mean(1)  # the control
    assert not torch.allclose(mean(batch), without_mask)


def test_padding_fills_with_the_value_at_the_end_of_one_axis() -> None:
    rows = [torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64)]
    sums = [int(fingerprint(row[None])) for row in rows]
    found = together(rows, sums, TensorSpec("int64", "DS", Pad("S", 7)))
    assert found is not None and found[0][1].tolist() == [[1, 7, 7], [1, 7, 7]]
    assert found[1].tolist() == fingerprint(found[0]).tolist() and found[1][0] == sums[0] and found[1][1] != sums[1]
    assert together(rows, sums, TensorSpec("int64", "DS", Pad("D"))) is None
    assert together(rows, sums, TensorSpec("int64", "DS")) is None
    alike = together(rows[:1] * 2, [5, 6], TensorSpec("int64", "DS"))  # sums that were made when they were encoded
    assert alike is not None and alike[1].tolist() == [5, 6]


def test_sizes_that_differ_without_a_pad_are_an_error_with_a_name(world: World) -> None:
    encoder = text_encoder()
    tensors = {"states": replace(STATES, pad=None), "mask": MASK}
    encoder.entry = EntrySpec("words", (CAPTION,), tensors)
    family = Toy(encoder)
    prepared = world.prepare(family)
    assert len(list(world.batches(family, prepared, 1))) == 4  # the control
    with pytest.raises(DataError) as caught:
        list(world.batches(family, prepared, 4))
    assert caught.value.code == "batch-sizes-differ" and "states" in caught.value.what and "words" in caught.value.where
    assert "5 x 3" in caught.value.what and "train.batch_size" in caught.value.fix


def test_a_text_encoder_that_does_not_fit_goes_to_the_cpu_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is only a name here: the encoder fails there, at once or at a long caption."""
    gpu = torch.device("cuda", 0)
    entries = []
    for where in ("load", "encode"):
        family, devices = Toy(text_encoder()), list[str]()
        world.cache = LatentCache(world.root / where)
        (encoder,) = family.made
        load = encoder.load

        def full(door: Any, where: str = where, load: Any = load, devices: list[str] = devices) -> Any:
            devices.append(door.transfer.device.type)
            encode = load(door)
            if door.transfer.device.type == "cuda" and where == "load":
                raise torch.OutOfMemoryError("HIP out of memory.")

            def encoded(inputs: Any) -> Any:
                if door.transfer.device.type == "cuda" and len(inputs[CAPTION]) > 3:
                    raise torch.OutOfMemoryError("HIP out of memory.")
                return encode(inputs)

            return encoded

        encoder.load = full  # type: ignore[method-assign]
        data = world.make.data(path=str(world.root / "data"))
        encoding = Encoding(
            world.cache,
            gpu,
            context=listening(world.notices),
            opened_placement=lambda device: SimpleNamespace(  # type: ignore[arg-type,return-value]
                transfer=SimpleNamespace(device=device), streaming=lambda: None
            ),
        )
        prepared = prepare(world.make.recipe(data), family, encoding)  # type: ignore[arg-type]
        assert devices == ["cuda", "cpu"] and len(prepared.items) == 4
        entries.append({path.name: path.read_bytes() for path in world.cache.root.rglob("*.safetensors")})
    assert entries[0] == entries[1] and len(entries[0]) == 5
    assert len(world.notices) == 2 and all("words" in said and "CPU" in said for said in world.notices)


class Door:
    """A placement in name only: on the GPU, on the GPU as a stream of layers, or on the CPU."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.transfer, self.name = SimpleNamespace(device=device), name or device.type

    def streaming(self) -> Door | None:
        return Door(self.transfer.device, "streamed") if self.name == "cuda" else None


@pytest.mark.parametrize(("fits", "wanted"), [("streamed", ["cuda", "streamed"]), ("cpu", ["cuda", "streamed", "cpu"])])
@pytest.mark.parametrize("where", ["load", "encode"])
def test_a_text_encoder_that_does_not_fit_is_streamed_before_it_goes_to_the_cpu(
    world: World, where: str, fits: str, wanted: list[str]
) -> None:
    family, doors = Toy(text_encoder()), list[str]()
    (encoder,) = family.made
    load = encoder.load

    def full(door: Any) -> Any:
        doors.append(door.name)
        encode = load(door)
        if where == "load" and door.name not in (fits, "cpu"):
            raise torch.OutOfMemoryError("HIP out of memory.")

        def encoded(inputs: Any) -> Any:
            if door.name not in (fits, "cpu") and len(inputs[CAPTION]) > 3:
                raise torch.OutOfMemoryError("HIP out of memory.")
            return encode(inputs)

        return encoded

    encoder.load = full  # type: ignore[method-assign]
    data = world.make.data(path=str(world.root / "data"))
    context, gpu = listening(world.notices), torch.device("cuda", 0)
    encoding = Encoding(world.cache, gpu, context=context, opened_placement=Door)  # type: ignore[arg-type]
    assert len(prepare(world.make.recipe(data), family, encoding).items) == 4  # type: ignore[arg-type]
    assert doors == wanted
    assert len(world.notices) == (fits == "cpu"), "the transfer itself says that it streams"


def test_an_encoder_that_does_not_fit_the_cpu_either_is_an_error(world: World) -> None:
    family = Toy(text_encoder())

    def full(caption: Any) -> Any:
        raise MemoryError

    family.made[0].tensors_of = full
    with pytest.raises(MachineError):
        world.prepare(family)
    assert world.notices == []


@pytest.mark.parametrize(
    ("name", "inputs"), [("Words", (CAPTION,)), ("a/b", (CAPTION,)), ("words", ()), ("words", ("So und",))]
)
def test_an_entry_of_no_kind_is_refused(name: str, inputs: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"entry: {name!r}"):
        EntrySpec(name, inputs, {})
    with pytest.raises(ValueError, match="no axis"):
        TensorSpec("float32", "SD", Pad("T"))


def test_an_input_that_nothing_provides_is_refused(world: World) -> None:
    sound = FakeEncoder(EntrySpec("words", ("sound",), {"states": STATES}), "words-1", states_of)
    with pytest.raises(TypeError, check=saying("encoded_cache/words-reads-sound-and-its-encoder-has")):
        world.prepare(Toy(sound))


def masked() -> Toy:
    """Captions of one state per word, and a mask that marks padding."""

    def made(caption: str) -> dict[str, Tensor]:
        states = states_of(caption)["states"]
        return {"states": states, "own": torch.ones(len(states), dtype=torch.bool)}

    own = TensorSpec("bool", "S", Pad("S"), if_padded=True)
    images = {"latent_mean": TensorSpec("float32", "CHW"), "latent_std": TensorSpec("float32", "CHW")}
    vae = FakeEncoder(EntrySpec("latents", (IMAGE,), images, True), "vae-1", latents_of)
    return Toy(vae, FakeEncoder(EntrySpec("words", (CAPTION,), {"states": STATES, "own": own}), "words-1", made))


@pytest.fixture
def lengths(tmp_path: Path, make: SimpleNamespace) -> World:
    """Twelve images of one size with captions of five or two words."""
    world = World(tmp_path, make)
    for index in range(12):
        make.image(
            tmp_path / "data" / f"{index}.png", 64, 64, seed=index, caption=" ".join("abcde"[: 5 - index % 2 * 3])
        )
    return world


def test_captions_of_one_length_go_together_and_need_no_mask(lengths: World) -> None:
    family = masked()
    prepared = lengths.prepare(family)
    batches = list(lengths.batches(family, prepared, 2))
    assert len(batches) == 6 and not any("own" in batch.tensors for batch in batches)
    assert {batch.tensors["states"].shape for batch in batches} == {(2, 6, 3), (2, 3, 3)}
    assert {item.lengths for item in prepared.items} == {(6, 1), (3, 1)}
    mixed = BatchPlan(prepared.items, 2, 1, 0, by_length=False)
    workers = open_workers(lengths.cache, prepared.entries, RuntimeSection())
    assert any("own" in batch.tensors for batch in loader(mixed, family, workers, 0, 6)), "the control"  # type: ignore[arg-type]
    workers.close()


def test_lengths_of_captions_are_in_the_manifest(lengths: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "KEPT_FROM", 3)
    found = tuple(lengths.prepare(masked()).items)
    monkeypatch.setattr(LatentCache, "num_bytes", None)
    assert tuple(lengths.prepare(masked()).items) == found and found[0].lengths == (6, 1)


def test_a_caption_whose_entry_vanishes_while_lengths_are_read_is_encoded_again(
    lengths: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, read = masked(), LatentCache.num_bytes

    def vanishing(self: LatentCache, kind: str, key: str, tensor: str) -> int:
        monkeypatch.undo()
        for path in self.root.rglob(f"{key}.safetensors"):
            path.unlink()
        return read(self, kind, key, tensor)

    monkeypatch.setattr(LatentCache, "num_bytes", vanishing)
    assert {item.lengths for item in lengths.prepare(family).items} == {(6, 1), (3, 1)}
    assert len(family.made[1].encoded) == 5
