"""A manifest is used where it is still true, and its entries equal the result of checking every image."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch

from lora_rocm.cache_store.maintenance import MANIFESTS, prune
from lora_rocm.dataset.images.image_io import UnreadableImage
from lora_rocm.encoded_cache import manifest, prepare
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import Prepared
from lora_rocm.loader.batches import BatchPlan, loader, open_workers
from tests.wording import says

CPU = torch.device("cpu")
DAY_S = 86400


class Starts:
    """Starts with one cache, each as a new process would. Starts that checked every image."""

    def __init__(self, root: Path, make: SimpleNamespace, new_family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.make, self.new_family = root, make, new_family
        self.keys: dict[str, Any] = {"path": str(root / "data"), "flip_aug": True, "validation_split": 0.3}
        self.sections: dict[str, Any] = {"sample": {"prompts": ["a house"]}}
        self.vae = "fake-vae-1"
        self.looked = 0
        self.monkeypatch = monkeypatch
        scan = prepare.find_samples

        def counted(*args: Any, **how: Any) -> Any:
            self.looked += 1
            return scan(*args, **how)

        monkeypatch.setattr(prepare, "find_samples", counted)
        monkeypatch.setattr(manifest, "KEPT_FROM", 3)

    def __call__(self) -> Prepared:
        self.recipe = self.make.recipe(self.make.data(**self.keys), **self.sections)
        self.family = self.new_family(self.recipe)
        self.family.image_encoder.fingerprint = self.vae
        return prepare.prepare(self.recipe, self.family, Encoding(LatentCache(self.root / "cache"), CPU))

    @property
    def encoded(self) -> int:
        return len(self.family.image_encoder.encoded) + len(self.family.text_encoder.encoded)


@pytest.fixture
def starts(tmp_path: Path, make: SimpleNamespace, new_family: Any, monkeypatch: pytest.MonkeyPatch) -> Starts:
    for index in range(6):
        make.image(tmp_path / "data" / f"{index} ü.png", 96 + 16 * index, 64, seed=index, caption=f"image {index}")
    make.image(tmp_path / "data" / "3_two" / "copy.png", 96, 64, seed=0, caption="a, b, c")
    for path in (tmp_path / "data").glob("*.txt"):
        os.utime(path, (10**9, 10**9))
    (tmp_path / "data" / "broken.png").write_bytes((tmp_path / "data" / "0 ü.png").read_bytes())
    make.spoil(tmp_path / "data" / "broken.png")
    return Starts(tmp_path, make, new_family, monkeypatch)


def parts(prepared: Prepared) -> tuple[Any, ...]:
    facts = prepared.facts, prepared.set_aside, prepared.notices, prepared.identity()
    return tuple(prepared.items), tuple(prepared.held_out), tuple(prepared.samples), *facts


def test_what_is_recalled_is_what_was_found(starts: Starts) -> None:
    first = parts(starts())
    assert len(first[0]) + len(first[1]) == 7 and first[1] and len(first[4]) == 1
    again = starts()
    assert starts.looked == 1 and starts.encoded == 0 and parts(again) == first
    for prompt in ("", "a house", "image 3"):
        again.text_lookup(prompt)
    plan = BatchPlan(again.items, 2, 1, seed=3)
    workers = open_workers(LatentCache(starts.root / "cache"), again.entries, starts.recipe.runtime)
    (batch,) = loader(plan, starts.family, workers, 0, 1)
    assert batch.tensors["latent_mean"].shape[0] == 2


def image_changes(starts: Starts) -> None:
    starts.make.image(starts.root / "data" / "2 ü.png", 128, 64, seed=99)


def caption_changes(starts: Starts) -> None:
    (starts.root / "data" / "2 ü.txt").write_text("another", encoding="utf-8")


def captions_exchanged(starts: Starts) -> None:
    one, other = (starts.root / "data" / f"{index} ü.txt" for index in (2, 3))
    assert one.stat().st_size == other.stat().st_size and one.stat().st_mtime_ns == other.stat().st_mtime_ns
    time.sleep(0.05)  # a tick of the system's clock
    one.rename(one.with_suffix(".old"))
    other.rename(one)
    one.with_suffix(".old").rename(other)


def another_reader(starts: Starts) -> None:
    starts.monkeypatch.setattr(manifest, "PILLOW_VERSION", "99")


def another_format(starts: Starts) -> None:
    """One that a plugin has taught to Pillow since."""
    extensions = manifest.readable_extensions()
    starts.monkeypatch.setattr(manifest, "readable_extensions", lambda: {*extensions, ".new"})


def another_program(starts: Starts) -> None:
    """It may cut images or shuffle captions otherwise."""
    starts.monkeypatch.setattr(manifest, "__version__", "99")


def entries_of_another_version(starts: Starts) -> None:
    starts.monkeypatch.setattr(manifest, "SPEC_VERSION", 99)


def touched(starts: Starts) -> None:
    os.utime(starts.root / "data" / "2 ü.txt", (1, 1))


def one_more(starts: Starts) -> None:
    starts.make.image(starts.root / "data" / "3_two" / "x.png", seed=50, caption="x")


def one_less(starts: Starts) -> None:
    (starts.root / "data" / "3 ü.png").unlink()


def image_entry_gone(starts: Starts) -> None:
    next((starts.root / "cache" / "image").rglob("*.safetensors")).unlink()


def text_entry_gone(starts: Starts) -> None:
    key = starts().items[0].keys["text"][0][0]
    next((starts.root / "cache" / "text").rglob(f"{key}*")).unlink()


def other_encoder(starts: Starts) -> None:
    starts.vae = "fake-vae-2"


def other_seed(starts: Starts) -> None:
    starts.sections = {**starts.sections, "train": {"max_train_steps": 4, "seed": 7}}


def other_data(starts: Starts) -> None:
    starts.keys = {**starts.keys, "repeats": 2}


def damage(starts: Starts) -> None:
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def cut_short(starts: Starts) -> None:
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    file.write_bytes(file.read_bytes()[:-50])


def none_is_kept_of_few(starts: Starts) -> None:
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    file.unlink()


CHANGES = [
    image_changes, caption_changes, touched, another_reader, another_format, another_program,
    entries_of_another_version, one_more, one_less, image_entry_gone, text_entry_gone, other_encoder, other_seed,
    other_data, damage, cut_short, none_is_kept_of_few, *([] if os.name == "nt" else [captions_exchanged]),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_where_anything_is_otherwise_everything_is_looked_at(starts: Starts, change: Callable[[Starts], None]) -> None:
    starts()
    change(starts)
    assert starts.looked == 1
    made = parts(starts())
    assert starts.looked == 2
    assert parts(starts()) == made and starts.looked == 2, "what was found is kept again"


def test_a_second_caption_file_is_looked_at_where_it_comes_changes_and_goes(starts: Starts) -> None:
    starts.keys = {**starts.keys, "caption_extension": (".txt", ".tags.txt")}
    first = starts()
    image = starts.root / "data" / first.items[0].key
    tags, identities = image.with_name(f"{image.stem}.tags.txt"), [first.identity()]
    changes: list[Callable[[], object]] = [
        lambda: tags.write_text("a, b", encoding="utf-8"),
        lambda: tags.write_text("a, c", encoding="utf-8"),
        tags.unlink,
    ]
    for change in changes:
        time.sleep(0.05)  # a tick of the system's clock
        change()
        identities.append(starts().identity())
        assert (starts.looked, starts.encoded) == (len(identities), 0 if change == tags.unlink else 1)
        assert starts().identity() == identities[-1] and starts.looked == len(identities), "the control: no change"
    assert identities[3] == identities[0] and len(set(identities)) == 3, "a checkpoint of other captions is refused"


def test_a_run_beside_the_images_changes_nothing(starts: Starts) -> None:
    first = parts(starts())
    starts.make.image(starts.root / "data" / "runs" / "one" / "samples" / "00.png")
    for name in ("recipe.yaml", "events.jsonl"):
        (starts.root / "data" / "runs" / "one" / name).touch()
    again = parts(starts())
    assert (starts.looked, again) == (1, first)


def test_of_few_images_nothing_is_kept(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "KEPT_FROM", 9)
    starts()
    starts()
    assert starts.looked == 2 and not (starts.root / "cache" / MANIFESTS).exists()


def test_what_could_not_be_read_for_now_is_not_kept(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.dataset.sources import sample_image as samples

    read = samples.read_plain

    def fails(path: Path, most: int) -> bytes:
        if path.name == "4 ü.png":
            raise OSError(5, "Input/output error")
        return read(path, most)

    monkeypatch.setattr(samples, "read_plain", fails)
    assert len(starts().set_aside) == 2
    assert not (starts.root / "cache" / MANIFESTS).exists()


def test_a_folder_that_could_not_be_read_for_now_is_not_kept(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.dataset.sources import folders

    listed = os.scandir

    def fails(path: Any, code: int = 5) -> Any:
        if Path(path).name == "3_two":
            raise OSError(code, os.strerror(code))
        return listed(path)

    monkeypatch.setattr(folders.os, "scandir", fails)
    monkeypatch.setattr(manifest, "_listed", lambda root, recursive: [b"as before"])
    assert says(starts().notices, "encoded_cache/cannot-be-read")
    assert not (starts.root / "cache" / MANIFESTS).exists()
    monkeypatch.setattr(folders.os, "scandir", lambda path: fails(path, 13))  # a permission error is not transient
    starts()
    assert len(list((starts.root / "cache" / MANIFESTS).iterdir())) == 1


def test_memory_that_ran_out_at_an_image_is_not_kept(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.dataset.sources import sample_image as samples

    decode, full = samples.decode, UnreadableImage("no memory")
    full.__cause__ = MemoryError()
    broken = (starts.root / "data" / "broken.png").read_bytes()

    def fails(content: bytes) -> Any:
        if content == broken:
            raise full
        return decode(content)

    monkeypatch.setattr(samples, "decode", fails)
    assert len(starts().set_aside) == 1
    assert not (starts.root / "cache" / MANIFESTS).exists()
    monkeypatch.undo()  # negative control: an image that is broken stays so
    monkeypatch.setattr(manifest, "KEPT_FROM", 3)
    assert len(starts().set_aside) == 1 and (starts.root / "cache" / MANIFESTS).exists()


def test_a_damaged_entry_is_made_again_when_it_is_read(starts: Starts) -> None:
    starts()
    prepared = starts()
    key = prepared.items[0].keys["image"][1][0]
    file = next((starts.root / "cache" / "image").rglob(f"{key}*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes(8))
    prepared.repair("image", key, "damaged")
    assert file.with_name(f"{key}-1.safetensors").read_bytes() == whole and starts.looked == 1
    text = prepared.items[0].keys["text"][0][0]
    prepared.repair("text", text, "damaged")
    assert len(starts.family.text_encoder.encoded) == 1


def test_entries_in_use_are_marked_once_a_day_and_no_others(starts: Starts) -> None:
    starts()
    entries = sorted((starts.root / "cache").rglob("*.safetensors"))
    other = entries[0].with_name("f" * 40 + ".safetensors").parent / f"{entries[0].parent.name}{'e' * 38}.safetensors"
    other.write_bytes(b"of another run")
    for entry in [*entries, other]:
        os.utime(entry, (time.time() - 2 * DAY_S,) * 2)
    starts()
    assert all(time.time() - entry.stat().st_mtime > DAY_S for entry in entries if "image" in entry.parts), (
        "the manifest is of today"
    )
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    os.utime(file, (time.time() - 2 * DAY_S,) * 2)
    starts()
    now = time.time()
    assert starts.looked == 1 and now - file.stat().st_mtime < DAY_S
    assert all(now - entry.stat().st_mtime < DAY_S for entry in entries) and now - other.stat().st_mtime > DAY_S


def test_a_dataset_that_names_files(tmp_path: Path, starts: Starts) -> None:
    names = [f"{index} ü.png" for index in range(6)]
    lines = [json.dumps({"image": str(tmp_path / "data" / name), "text": "x"}) for name in names]
    (tmp_path / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    starts.keys = {"sources": ({"dataset": str(tmp_path / "list.jsonl")},)}
    first = parts(starts())
    assert parts(starts()) == first and starts.looked == 1
    starts.make.image(tmp_path / "data" / "5 ü.png", 64, 64, seed=77)
    assert parts(starts()) != first and starts.looked == 2


def test_a_manifest_that_no_run_has_wanted_for_long_is_pruned(starts: Starts) -> None:
    starts()
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    left = file.with_name(f".{file.name}.1.0123abcd.tmp")
    left.write_bytes(b"x")
    for path in (file, left):
        os.utime(path, (time.time() - 9 * DAY_S,) * 2)
    starts()  # wants it
    prune(starts.root / "cache", lambda text: None, older_than_days=3, dry_run=False)
    assert file.exists() and not left.exists()
    os.utime(file, (time.time() - 9 * DAY_S,) * 2)
    prune(starts.root / "cache", lambda text: None, older_than_days=None, dry_run=False)
    assert file.exists()
    prune(starts.root / "cache", lambda text: None, older_than_days=3, dry_run=False)
    assert not file.exists()


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def forged(file: Path, change: Change) -> None:
    """Change header and columns of a manifest, and make its digest right again."""
    batch = pyarrow.ipc.open_stream(file.read_bytes()[:-32]).read_next_batch()
    header = json.loads(batch.schema.metadata[b"lora_rocm"])
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    change(header, columns)
    batch = pyarrow.record_batch(columns, metadata={"lora_rocm": json.dumps(header)})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    body = sink.getvalue().to_pybytes()
    file.write_bytes(body + hashlib.sha256(body).digest())


def last(name: str, value: Any) -> Change:
    """Another value in the last row of a column."""
    return lambda header, columns: columns.update(
        {name: pyarrow.array([*columns[name].to_pylist()[:-1], value], columns[name].type)}
    )


def ends_before_it_begins(header: dict[str, Any], columns: dict[str, Any]) -> None:
    column = columns["caption"]
    size = column.buffers()[2].size
    ends = pyarrow.array([0, size, *[0] * (len(column) - 2), size], pyarrow.int64()).buffers()[1]
    columns["caption"] = pyarrow.LargeBinaryArray.from_buffers(
        column.type, len(column), [None, ends, column.buffers()[2]]
    )


FORGERIES: dict[str, Change] = {
    "nothing": lambda header, columns: None,
    "more to train on than there are": lambda header, columns: header.update(num_training=99),
    "none to train on": lambda header, columns: header.update(num_training=-1),
    "a number that is none": lambda header, columns: header.update(num_training="3"),
    "a text that ends before it begins": ends_before_it_begins,
    "a source that is none": last("source", 7),
    "a source below zero": last("source", -1),
    "half a key": last("key text", bytes(30)),
    "no keys": last("key text", b""),
    "nothing in a row": last("sha256", None),
    "numbers of another kind": lambda header, columns: columns.update(width=columns["width"].cast("int32")),
    "a column that is missing": lambda header, columns: columns.pop("cut"),
    "no problems": lambda header, columns: header.update(set_aside=[{"x": 1}]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_manifest_that_was_tampered_with_is_not_taken(starts: Starts, name: str) -> None:
    made = parts(starts())
    (file,) = (starts.root / "cache" / MANIFESTS).iterdir()
    forged(file, FORGERIES[name])
    assert parts(starts()) == made and starts.looked == (1 if name == "nothing" else 2)
