import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lora_rocm.encoded_cache import prepare as prepare_module
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.prepare import Prepared, choose_held_out, prepare
from lora_rocm.errors import DataError
from lora_rocm.foundation.seeds import fraction
from tests.wording import says

CPU = torch.device("cpu")
hashes = st.lists(st.integers(0, 10**6).map(str), max_size=30).map(
    lambda made: {f"{n}.png": h for n, h in enumerate(made)}
)


class Runs:
    """Prepares the same folder again and again, each time as a new process would: a new family, the same cache."""

    def __init__(self, root: Path, make: SimpleNamespace, new_family: Any) -> None:
        self.root, self.make, self.new_family = root, make, new_family
        self.keys: dict[str, Any] = {}
        self.vae = "fake-vae-1"
        self.text = "fake-text-1"

    def __call__(self, emit: Any = lambda *progress: None, **sections: Any) -> Prepared:
        recipe = self.make.recipe(self.make.data(**{"path": str(self.root / "data"), **self.keys}), **sections)
        family = self.new_family(recipe)
        family.image_encoder.fingerprint, family.text_encoder.fingerprint = self.vae, self.text
        encoding = Encoding(LatentCache(self.root / "cache"), CPU, emit)
        self.prepared = prepare(recipe, family, encoding)
        self.encoded = (len(family.image_encoder.encoded), len(family.text_encoder.encoded))
        self.loads = (family.image_encoder.loads, family.text_encoder.loads)
        return self.prepared


@pytest.fixture
def runs(tmp_path: Path, make: SimpleNamespace, new_family: Any) -> Runs:
    for index in range(4):
        make.image(tmp_path / "data" / f"{index}.png", 96 + 16 * index, 64, seed=index, caption=f"image {index}")
    return Runs(tmp_path, make, new_family)


def test_the_items(runs: Runs) -> None:
    runs.keys = {"flip_aug": True, "repeats": 2, "caption_dropout_rate": 0.1}
    prepared = runs(sample={"prompts": ["a house"], "control_prompts": ["a tree"], "negative_prompt": "bad"})
    assert [item.key for item in prepared.items] == [sample.key for sample in prepared.samples]
    item = prepared.items[0]
    assert (item.key, item.num_views, item.num_captions, item.repeats) == ("0.png", 2, 1, 2)
    ((caption, empty),) = item.keys["text"]
    assert item.dropout_rate == 0.1 and caption != empty and len(item.keys["image"]) == 2
    assert runs.encoded == (8, 8)  # 4 captions, the empty one, 2 prompts, the negative prompt
    for prompt in ("", "a house", "a tree", "bad", "image 3"):
        prepared.text_lookup(prompt)
    assert prepared.held_out == () and prepared.set_aside == ()


def test_each_source_has_its_weight(runs: Runs) -> None:
    path = str(runs.root / "data")
    sources = [{"path": path, "loss_weight": 0.5}, {"path": path}]
    runs.keys = {"path": None, "sources": sources, "loss_weight": 2.0, "validation_split": 0.3}
    prepared = runs()
    assert {(item.key[:10], item.loss_weight) for item in prepared.items} == {("sources[0]", 0.5), ("sources[1]", 2.0)}
    runs.keys = {}
    assert {item.loss_weight for item in runs().items} == {1.0} and runs.encoded == (0, 0), "the cache is the same"


def test_regularisation_images_are_as_many_as_the_others_and_never_held_out(runs: Runs) -> None:
    for index in range(2):
        runs.make.image(runs.root / "reg" / f"{index}.png", 64, 64, seed=10 + index, caption="a cat")
    own, reg = {"path": str(runs.root / "data")}, {"path": str(runs.root / "reg"), "is_reg": True}
    runs.keys = {"path": None, "sources": [reg, own], "prior_loss_weight": 0.5, "validation_split": 0.4}
    prepared = runs()
    learned = [item for item in prepared.items if item.key.startswith("sources[1]")]
    others = [item for item in prepared.items if item not in learned]
    assert prepared.held_out and all(item.key.startswith("sources[1]") for item in prepared.held_out)
    assert {item.loss_weight for item in others} == {0.5} and {item.loss_weight for item in learned} == {1.0}
    assert sum(item.repeats for item in others) == max(len(learned), 1) and len(learned) + len(prepared.held_out) == 4
    outline = prepared.items.outline()  # type: ignore[attr-defined]
    assert outline.repeats_N.tolist() == [item.repeats for item in prepared.items]
    assert prepared.facts.folders["reg"]["num_reg"] == len(learned)
    runs.keys |= {"sources": [reg, {**own, "repeats": 2}], "validation_split": 0.0}
    assert [item.repeats for item in runs().items] == [4, 4, 2, 2, 2, 2] and not prepared.notices[-1].startswith("1 of")
    runs.keys |= {"sources": [{**reg, "repeats": 9}, own]}
    assert [item.repeats for item in runs().items] == [9, 1, 1, 1, 1]
    assert says(runs.prepared.notices, "encoded_cache/1-of-the-regularisation-images")


def test_what_is_trained_on_is_hashed_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()
    monkeypatch.setattr(prepare_module, "identity", lambda items: hashed.append(len(items)) or "same")
    prepared = runs()
    assert prepared.identity() == prepared.identity() == "same" and hashed == [4]


def test_a_complete_cache_loads_no_encoder(runs: Runs) -> None:
    first = runs()
    assert runs.encoded == (4, 5) and runs.loads == (1, 1)
    again = runs()
    assert runs.encoded == (0, 0) and runs.loads == (0, 0)
    assert again.items == first.items


def test_one_image_changed(runs: Runs) -> None:
    runs()
    runs.make.image(runs.root / "data" / "2.png", 128, 64, seed=99)
    runs()
    assert runs.encoded == (1, 0) and runs.loads == (1, 0)


def test_one_caption_changed(runs: Runs) -> None:
    runs()
    (runs.root / "data" / "2.txt").write_text("another", encoding="utf-8")
    runs()
    assert runs.encoded == (0, 1) and runs.loads == (0, 1)


def test_captions_that_the_encoders_cut_off_are_said(runs: Runs) -> None:
    assert not [notice for notice in runs().notices if "longer than" in notice]
    (next((runs.root / "data").glob("*.txt"))).write_text("word " * 5000, encoding="utf-8")
    (notice,) = [notice for notice in runs().notices if "longer than" in notice]
    assert says(notice, "encoded_cache/1-caption-is") and "word" in notice and len(notice) < 200


def test_crops_that_cut_off_much_are_said(runs: Runs) -> None:
    (notice,) = [notice for notice in runs().notices if "to the crop" in notice]
    assert says(notice, "encoded_cache/1-image-loses-more-than-25-of")
    runs.make.image(runs.root / "data" / "wide.png", 320, 64, seed=98)
    (notice,) = [notice for notice in runs().notices if "to the crop" in notice]
    assert says(notice, "encoded_cache/2-images-lose") and "wide.png" in notice


def test_another_encoder(runs: Runs) -> None:
    runs()
    runs.vae = "fake-vae-2"
    runs()
    assert runs.encoded == (4, 0)
    runs.text = "fake-text-2"
    runs()
    assert runs.encoded == (0, 5)


def test_another_resolution_or_crop(runs: Runs) -> None:
    runs()
    runs.keys = {"resolution": 48}
    runs()
    assert runs.encoded == (4, 0)
    runs.keys = {"enable_bucket": False}
    runs()
    assert runs.encoded == (4, 0)
    runs.keys = {}
    runs()
    assert runs.encoded == (0, 0)


def test_only_the_cut_of_some_images_changes(runs: Runs) -> None:
    """Another limit on the aspect ratio moves the wide images only."""
    runs.make.image(runs.root / "data" / "wide.png", 240, 64, seed=7, caption="x")
    before = runs().items
    runs.keys = {"bucket_max_aspect": 4.0}
    after = runs().items
    moved = [a.key for a, b in zip(before, after, strict=True) if a.geometry != b.geometry]
    assert moved == ["3.png", "wide.png"] and runs.encoded == (2, 0)


def test_a_renamed_or_added_image(runs: Runs) -> None:
    runs()
    for suffix in (".png", ".txt"):
        (runs.root / "data" / f"0{suffix}").rename(runs.root / "data" / f"renamed{suffix}")
    runs()
    assert runs.encoded == (0, 0)
    runs.make.image(runs.root / "data" / "new.png", seed=50, caption="new")
    runs()
    assert runs.encoded == (1, 1)


def test_options_encode_what_they_add(runs: Runs) -> None:
    runs()
    runs.keys = {"flip_aug": True}
    runs()
    assert runs.encoded == (4, 0)
    runs.keys = {"trigger_word": "zibu"}
    runs()
    assert runs.encoded == (0, 4)


def test_shuffled_captions_are_cached(runs: Runs) -> None:
    for index in range(4):
        (runs.root / "data" / f"{index}.txt").write_text(f"{index}, a, b, c, d", encoding="utf-8")
    runs.keys = {"shuffle_caption": True, "keep_tokens": 1, "caption_variants": 3}
    prepared = runs()
    assert all(item.num_captions == 3 for item in prepared.items) and runs.encoded == (4, 13)


def test_the_texts_of_wildcards_and_of_lines_are_cached(runs: Runs) -> None:
    for index in range(4):
        (runs.root / "data" / f"{index}.txt").write_text(f"{index} {{a|b}}\n{index} c", encoding="utf-8")
    runs.keys = {"enable_wildcard": True}
    prepared = runs()
    assert all(item.num_captions == 3 for item in prepared.items) and runs.encoded == (4, 13)


def test_what_is_set_aside(runs: Runs) -> None:
    data = runs.root / "data"
    (data / "0.png").write_bytes(b"")
    runs.make.spoil(data / "1.png")
    runs.make.image(data / "thin.png", 100, 10, caption="x")
    prepared = runs()
    assert [item.key for item in prepared.items] == ["2.png", "3.png"]
    assert [Path(problem.where).name for problem in prepared.set_aside] == ["0.png", "thin.png", "1.png"]
    assert runs.encoded == (2, 3)  # no caption of an image that is not used


def test_copies_of_a_broken_image_are_all_set_aside(runs: Runs) -> None:
    data = runs.root / "data"
    for name in ("0.png", "copy.png"):
        (data / name).write_bytes((data / "1.png").read_bytes())
        runs.make.spoil(data / name)
    assert {item.key for item in runs().items} == {"1.png", "2.png", "3.png"}
    assert {Path(problem.where).name for problem in runs.prepared.set_aside} == {"0.png", "copy.png"}


def test_nothing_usable(runs: Runs) -> None:
    for path in (runs.root / "data").glob("*.png"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError) as caught:
        runs()
    assert caught.value.code == "no-usable-images"


def test_facts_for_the_metadata(runs: Runs) -> None:
    runs.make.image(runs.root / "data" / "10_cat" / "c.png", seed=9, caption="a, b, a")
    facts = runs().facts
    assert facts.folders == {"10_cat": {"n_repeats": 10, "img_count": 1}, "data": {"n_repeats": 1, "img_count": 4}}
    assert facts.tag_frequency["10_cat"] == {"a": 2, "b": 1}
    assert sum(facts.bucket_counts.values()) == 14


def test_progress(runs: Runs) -> None:
    said: list[tuple[str, int, int, float]] = []
    runs(emit=lambda *facts: said.append(facts))
    last = {what: (done, total) for what, done, total, _ in said}
    assert last == {"hashes": (4, 4), "images": (4, 4), "captions": (5, 5)}


def test_progress_with_very_many_captions(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is gone through several times, which takes minutes where there are very many."""
    monkeypatch.setattr(prepare_module, "QUIET_S", 0.0)
    said: list[tuple[str, int, int, float]] = []
    runs(emit=lambda *facts: said.append(facts))
    assert [facts[:3] for facts in said].count(("texts", 4, 4)) >= 3


def test_holding_out(runs: Runs) -> None:
    runs.keys = {"validation_split": 0.5, "flip_aug": True, "repeats": 3, "caption_dropout_rate": 0.5}
    for index in range(4, 12):
        runs.make.image(runs.root / "data" / f"{index}.png", seed=index, caption="x, y")
    prepared = runs()
    held = {item.key for item in prepared.held_out}
    assert 0 < len(held) < 12 and held | {item.key for item in prepared.items} == {f"{n}.png" for n in range(12)}
    assert all((i.num_views, i.repeats, i.dropout_rate) == (1, 1, 0.0) for i in prepared.held_out)
    assert any("held out" in notice for notice in prepared.notices)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(hashes, st.sampled_from([0.05, 0.2, 0.5]), st.integers(10**6 + 1, 10**7).map(str))
def test_adding_an_image_moves_no_other(found: dict[str, str], share: float, new: str) -> None:
    below = [fraction("held out", sha256) < share for sha256 in found.values()]
    assume(any(below) and not all(below))  # else one was moved over so that no part is empty
    before, after = choose_held_out(found, share), choose_held_out({**found, "new": new}, share)
    assert after - {"new"} == before


@given(hashes, st.sampled_from([0.05, 0.2, 0.5]))
def test_no_part_is_empty_and_copies_stay_together(found: dict[str, str], share: float) -> None:
    held = choose_held_out(found, share) if found else set()
    if len(set(found.values())) > 1:
        assert 0 < len(held) < len(found)
    else:
        assert held == set()
    for value in found.values():
        assert len({key in held for key, other in found.items() if other == value}) == 1


def test_the_share_is_about_right() -> None:
    found = {str(number): str(number) for number in range(2000)}
    assert 160 < len(choose_held_out(found, 0.1)) < 240 and choose_held_out(found, 0.0) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_not_utf8(runs: Runs) -> None:
    data = runs.root / "data"
    os.rename(data / "0.png", os.fsencode(data) + b"/caf\xe9.png")
    prepared = runs()
    assert [item.key for item in prepared.items] == ["1.png", "2.png", "3.png", "caf\\udce9.png"]
    json.dumps([*prepared.notices, prepared.items[3].key], ensure_ascii=False).encode("utf-8")


def test_versions_of_an_image_are_cached_and_found_again(runs: Runs) -> None:
    runs.keys = {"flip_aug": True}
    plain = {key for item in runs().items for (key,) in item.keys["image"]}
    assert runs.encoded[0] == 8
    runs.keys = {"flip_aug": True, "random_crop": 3, "color_aug": 1, "validation_split": 0.3}
    prepared = runs()
    wide = next(item for item in prepared.items if item.key == "3.png")
    assert wide.num_views == 12 == len({key for (key,) in wide.keys["image"]}) and len(set(wide.crops)) == 3
    assert wide.geometry == wide.crops[0] and wide.geometry.crop_top_left != wide.crops[2].crop_top_left
    assert {len(item.keys["image"]) for item in prepared.held_out} == {1}
    prepared.repair("image", wide.keys["image"][7][0], "a test")
    assert runs() == runs() or runs.encoded == (0, 0)
    runs.keys = {"flip_aug": True}
    assert {key for item in runs().items for (key,) in item.keys["image"]} == plain and runs.encoded == (0, 0)


def test_a_table_gives_weights_and_several_captions(runs: Runs) -> None:
    rows = [
        {"file_name": "0.png", "w": 2.0, "text": ["a", "b", "c"]},
        {"file_name": "1.png", "w": 0.5, "c": [8, 0, 64, 64], "text": "d"},
    ]
    (runs.root / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name in ("0.txt", "1.txt"):
        (runs.root / "data" / name).unlink()
    source = {"path": str(runs.root / "data"), "loss_weight_column": "w"}
    runs.keys = {"path": None, "sources": [source], "loss_weight": 3.0}
    first = runs()
    assert [item.loss_weight for item in first.items] == [6.0, 1.5, 3.0, 3.0]
    assert [item.num_captions for item in first.items] == [3, 1, 1, 1]
    source["crop_column"] = "c"
    cropped = runs()
    assert cropped.items[1].geometry.target_hw == (64, 64) != first.items[1].geometry.target_hw
    assert runs.encoded == (1, 0)
    rows[0]["w"] = 1.0
    (runs.root / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert runs().identity() != cropped.identity(), "other weights are another loss"


def test_a_folder_at_several_resolutions(runs: Runs) -> None:
    runs.keys = {"resolution": [48, 64], "validation_split": 0.3}
    prepared = runs()
    assert len(prepared.items) + len(prepared.held_out) == 8 and runs.encoded[0] == 8
    held = {item.key.partition("/")[2] for item in prepared.held_out}
    assert held.isdisjoint(item.key.partition("/")[2] for item in prepared.items), "no image is seen at another size"
    runs.keys = {"resolution": 48}
    assert runs().items and runs.encoded[0] == 0, "the cache is the same"
