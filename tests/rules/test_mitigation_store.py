"""Facts remembered about a machine: kept, recalled for matching runs, damaged, forgotten, reported."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import StorageError
from lora_rocm.recipe.adapter_sections import ModuleOverride, NewToken
from lora_rocm.recipe.kinds import kinds_of, recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import DdpmSection
from lora_rocm.recipe.suggest import all_keys
from lora_rocm.rules import mitigation_store, this_machine
from lora_rocm.rules.environment import plan
from lora_rocm.rules.mitigation_records import Remembered
from lora_rocm.rules.mitigation_store import (
    forget,
    in_force,
    keep,
    key_of,
    notices,
    path_of,
    recall,
    workload_of,
    workloads_of,
)
from lora_rocm.rules.mitigations import candidates, changes, changes_by_id
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from tests.families.toy_families import TOYS
from tests.hardware.situations import facts_of, situation, with_torch
from tests.rules.test_environment import recipe
from tests.wording import mentions, says

XTX = "linux-rx7900xtx"
MACHINE, OF_SIZE = "sdma-off", "micro-batch-halved"


IN_TRAINING: dict[str, Any] = {
    "model.name_or_path": "other",
    "model.quantization": "nf4",
    "model.compute": "int8",
    "model.training_adapter": "other.safetensors",
    "data.resolution": 512,
    "data.control_path": "controls",
    "data.control_column": ("first", "second"),
    "data.frames": 5,
    "data.packing": True,
    "train.batch_size": 3,
    "train.mixed_precision": "fp16",
    "train.gradient_checkpointing": True,
    "train.ema_decay": 0.9,
    "lora.rank": 32,
    "lora.conv_rank": 32,
    "lora.init": "pissa",
    "lora.train_norms": True,
    "lora.overrides": (ModuleOverride(match=".*", rank=32),),
    "lora.targets": "attention",
    "lora.train_text_encoder": True,
    "lora.new_tokens": (NewToken(token="<zibu>", init="creature"),),
    "lora.use_dora": True,
    "lora.weight_dtype": "bf16",
    "lora.dropout": 0.1,
    "lora.rank_dropout": 0.1,
    "lora.module_dropout": 0.1,
    "runtime.memory": "keep",
    "runtime.compile": "regional",
    "runtime.attention": "math",
    "runtime.graphs": "off",
    "runtime.device": "cpu",
}
"""Each with a value that is not its default."""
IN_PREVIEWS = (
    "model.name_or_path", "model.quantization", "model.compute", "data.resolution", "train.mixed_precision",
    "runtime.device", "sample.width", "sample.height",
)  # fmt: skip
KEYS = tuple(all_keys(kinds_of({}).recipe))
MANY_KEYS_OF = ("timeouts", "output", "cache", "optim")
NO_PART_OF_THE_SIZE: dict[str, str] = {
    **dict.fromkeys(("model.family", "model.config", "model.vae", "model.revision"), "of one size in a family"),
    "model.prediction_type": "another formula",
    "model.max_token_length": "some MB of keys and values an image",
    **dict.fromkeys(
        [f"objective.{key}" for key in DdpmSection.model_fields if key != "zero_terminal_snr"], "another formula"
    ),
    "objective.zero_terminal_snr": "another table",
    **dict.fromkeys(("data.path", "data.sources", "data.repeats", "data.trigger_word"), "which images"),
    **dict.fromkeys(("data.recursive", "data.include", "data.exclude"), "which images"),
    **dict.fromkeys(("data.caption_extension", "data.caption_fallback", "data.shuffle_caption"), "which captions"),
    **dict.fromkeys(("data.caption_prefix", "data.caption_suffix", "data.enable_wildcard"), "which captions"),
    **dict.fromkeys(("data.caption_tag_dropout_rate", "data.metadata_file"), "which captions"),
    **dict.fromkeys(("data.keep_tokens", "data.caption_dropout_rate", "data.caption_variants"), "which captions"),
    "data.random_crop": "another place of the same size",
    "data.color_aug": "other colours of the same size",
    "data.watched": "which images",
    "data.max_length": "of texts, which images are not; their workload names it",
    "data.flip_aug": "more entries, not larger ones",
    **dict.fromkeys(("data.mask_path", "data.alpha_mask", "data.unmasked_weight"), "one number a latent"),
    "data.normalize_masked_area_loss": "one number a latent",
    **dict.fromkeys(("train.validation_every_n_epochs", "data.watched"), "a pass without a backward pass"),
    **dict.fromkeys(("data.loss_weight", "data.prior_loss_weight"), "one number a sample"),
    **dict.fromkeys(("data.bucket_step", "data.bucket_max_aspect", "data.enable_bucket"), "the area stays"),
    "data.upscale": "which bucket a small image has",
    **dict.fromkeys(("data.validation_split", "train.validation_every_n_steps"), "a pass without a backward pass"),
    **dict.fromkeys(
        ("lora.alpha", "lora.conv_alpha", "lora.use_rslora", "lora.init_from"), "another number in the same tensors"
    ),
    "lora.loraplus_lr_ratio": "a rate",
    "lora.scale_weight_norms": "after the update, one shape of modules at a time",
    "lora.type": "the adapter's title says it",
    **dict.fromkeys(("train.max_train_steps", "train.epochs", "train.seed"), "more of the same"),
    "train.gradient_accumulation_steps": "one after the other",
    **dict.fromkeys((key for key in KEYS if key.partition(".")[0] in MANY_KEYS_OF and "." in key), "no tensors"),
    **dict.fromkeys((key for key in KEYS if key.startswith("sample.")), "previews: see IN_PREVIEWS"),
    **dict.fromkeys(("runtime.workers", "runtime.worker_timeout_s", "runtime.persistent_workers"), "main memory"),
    **dict.fromkeys(("runtime.workers_on_windows", "runtime.pin_memory", "runtime.threads"), "main memory"),
    **dict.fromkeys(("runtime.deterministic", "runtime.canary_every_n_steps", "runtime.profile"), "which kernels"),
    **dict.fromkeys(("runtime.self_test", "runtime.max_restarts", "runtime.telemetry"), "before and between runs"),
}
"""Keys that decide nothing about memory, and why."""
ALL_VALUES: dict[str, Any] = {
    **IN_TRAINING,
    "sample.width": 256,
    "sample.height": 256,
    "train.seed": 7,
    "train.max_train_steps": 9,
    "train.gradient_accumulation_steps": 5,
    "optim.learning_rate": 0.5,
    "data.path": "elsewhere",
    "output.dir": "elsewhere",
}


def changed(made: Recipe, key: str, value: object) -> Recipe:
    section, _, leaf = key.partition(".")
    return made.model_copy(update={section: getattr(made, section).model_copy(update={leaf: value})})


def of_size(**train: object) -> Recipe:
    made = recipe()
    return made.model_copy(update={"train": made.train.model_copy(update={"batch_size": 4, **train})})


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Situation:
    """A start on "this machine"; its folder has spaces and letters that are not ASCII."""
    folder = tmp_path / "Zoë K"
    monkeypatch.setattr(this_machine, "probe", lambda deep: facts_of(XTX))
    monkeypatch.setenv("LORA_ROCM_HOME", str(folder))
    return situation_here(of_size())


def file_of(made: Situation) -> Path:
    return path_of(Path(made.app_dir), key_of(made.facts, made.selection))


def make(made: Situation, change: str, seen: str = "hang") -> Situation:
    """As in a run: the change takes effect, then it is remembered."""
    after = replace(made, changes=(*made.changes, change))
    keep(after, [change], seen, mute)
    return after


def mute(text: str) -> None:
    pytest.fail(f"nothing was to be said: {text}")


def test_what_is_kept_is_in_force_at_the_next_start_and_in_its_plan(start: Situation) -> None:
    assert start.changes == () and start.remembered == Remembered()
    assert "HSA_ENABLE_SDMA" not in {row.variable for row in plan(start).variables}
    keep(start, [MACHINE], "hang", mute)
    again = situation_here(of_size())
    assert again.changes == (MACHINE,)
    assert {row.variable: row.value for row in plan(again).variables}["HSA_ENABLE_SDMA"] == "0"
    assert in_force(recall(Path(start.app_dir), key_of(start.facts, start.selection)), ()) == (MACHINE,)
    (entry,) = json.loads(file_of(start).read_text(encoding="utf-8"))["entries"]
    assert entry == {"change": MACHINE, "seen": "hang", "when": entry["when"], "workload": None}
    assert len(entry["when"]) == 10
    assert os.listdir(file_of(start).parent) == [file_of(start).name], "no temporary file is left"


def test_another_stack_knows_nothing(start: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(start, [MACHINE], "hang", mute)
    newer = with_torch(XTX, version="2.14.0+rocm7.2")
    monkeypatch.setattr(this_machine, "probe", lambda deep: newer)
    assert situation_here(of_size()).changes == ()
    assert key_of(newer, start.selection) != key_of(start.facts, start.selection)


def test_without_a_gpu_torch_is_the_key() -> None:
    made, newer = situation("cpu-only"), situation(with_torch("cpu-only", version="9.9"))
    none = situation(replace(facts_of("cpu-only"), torch=None))
    keys = {key_of(each.facts, each.selection) for each in (made, newer, none)}
    assert len(keys) == 3 and key_of(made.facts, made.selection) == key_of(made.facts, made.selection)


def test_a_recorded_machine_has_no_memory(start: Situation) -> None:
    keep(start, [MACHINE], "hang", mute)
    recorded = situation_here(of_size(), facts_of(XTX))
    assert recorded.changes == () and recorded.remembered is None and notices(recorded) == []


def test_what_is_for_a_size_counts_for_that_size_only(start: Situation) -> None:
    run = start
    for change in (OF_SIZE, MACHINE, OF_SIZE):
        run = make(run, change)
    assert situation_here(of_size()).changes == (OF_SIZE, MACHINE, OF_SIZE)
    assert plan(situation_here(of_size())).settings.micro_batch_parts == 4
    assert situation_here(of_size(batch_size=2)).changes == (MACHINE,)
    assert situation_here().changes == (MACHINE,), "no recipe, no size"


def test_what_is_for_a_size_is_not_kept_where_no_recipe_tells_it(start: Situation) -> None:
    keep(replace(start, recipe=None), [OF_SIZE], "out-of-memory", mute)
    assert not file_of(start).exists()


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.id)
def test_none_is_kept_more_often_than_it_can_be_made(change: object, start: Situation) -> None:
    run = start
    for _ in range(change.most + 2):  # type: ignore[attr-defined]
        run = make(run, change.id)  # type: ignore[attr-defined]
    assert situation_here(of_size()).changes == (change.id,) * change.most  # type: ignore[attr-defined]


class Killed(BaseException):
    """Simulates a kill between two writes for the writer."""


@pytest.mark.parametrize(
    ("calls", "left"), [([[MACHINE, OF_SIZE]], (MACHINE, OF_SIZE)), ([[MACHINE], [OF_SIZE]], (MACHINE,))]
)
def test_what_answers_one_thing_is_kept_in_one_write(
    start: Situation, monkeypatch: pytest.MonkeyPatch, calls: list[list[str]], left: tuple[str, ...]
) -> None:
    """A kill comes after the first write: two changes of one answer are there; of two answers one is."""
    whole, writes = mitigation_store.write_atomic, list[Path]()

    def write(path: Path, content: bytes, **how: bool) -> None:
        if writes:
            raise Killed
        writes.append(path)
        whole(path, content, **how)

    monkeypatch.setattr(mitigation_store, "write_atomic", write)
    run = replace(start, changes=(MACHINE, OF_SIZE))
    with suppress(Killed):
        for changes in calls:
            keep(run, changes, "hang", mute)
    assert situation_here(of_size()).changes == left


def test_two_runs_that_go_equally_far_are_remembered_as_one(start: Situation) -> None:
    """Both began before either had failed."""
    for _ in range(2):
        make(make(start, OF_SIZE), OF_SIZE)
    assert situation_here(of_size()).changes == (OF_SIZE, OF_SIZE)
    make(make(make(start, OF_SIZE), OF_SIZE), OF_SIZE)
    assert situation_here(of_size()).changes == (OF_SIZE,) * 3


def test_an_unknown_change_cannot_be_kept_and_one_of_another_version_is_passed_over(start: Situation) -> None:
    with pytest.raises(KeyError):
        keep(start, ["no-such-change"], "hang", mute)
    keep(start, [MACHINE], "hang", mute)
    path = file_of(start)
    path.write_text(path.read_text(encoding="utf-8").replace(MACHINE, "of-the-future"), encoding="utf-8")
    made = situation_here(of_size())
    assert made.changes == () and made.remembered is not None and len(made.remembered.entries) == 1
    assert notices(made) == [] and "another version" in mitigation_store.described(made.remembered.entries)[0]
    keep(start, [MACHINE], "hang", mute)
    assert len(recall(path.parent, key_of(start.facts, start.selection)).entries) == 2, "it is left in the file"


GOOD = {"change": MACHINE, "seen": "hang", "when": "2026-11-21", "workload": None}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": 2, "entries": []}',
        b'{"format": 1}',
        b'{"format": 1, "entries": 3}',
        b'{"format": 1, "entries": [3]}',
        *(
            json.dumps({"format": 1, "entries": [{**GOOD, **wrong}]}).encode()
            for wrong in (
                {"change": 3},
                {"seen": None},
                {"when": "yesterday"},
                {"workload": {"id": "a"}},
                {"workload": 3},
            )
        ),
    ],
)
def test_a_damaged_file_is_forgotten_with_a_word_and_begun_anew(content: bytes, start: Situation) -> None:
    path = file_of(start)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    made = situation_here(of_size())
    assert made.changes == () and made.remembered == Remembered(damaged=True)
    (notice,) = notices(made)
    assert says(notice, "rules/cannot-be-read") and mitigation_store.FORGET in notice
    said: list[str] = []
    keep(made, [MACHINE], "hang", said.append)
    assert len(said) == 1 and str(path) in said[0]
    assert situation_here(of_size()).changes == (MACHINE,) and not mentions(
        str(notices(situation_here(of_size()))), "rules/cannot-be-read"
    )


def test_a_sound_file_is_not_called_damaged(start: Situation) -> None:
    path = file_of(start)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 1, "entries": [GOOD]}), encoding="utf-8")
    assert not recall(path.parent, key_of(start.facts, start.selection)).damaged
    assert situation_here(of_size()).changes == (MACHINE,)


def test_a_folder_that_cannot_be_written_is_said_and_is_no_error(start: Situation, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("", encoding="utf-8")
    said: list[str] = []
    keep(replace(start, app_dir=str(blocked)), [MACHINE], "hang", said.append)
    assert len(said) == 1 and str(blocked) in said[0] and says(said[0], "rules/learn-this-again")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(start: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(start, [MACHINE], "hang", mute)
    before, said = file_of(start).read_bytes(), list[str]()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    keep(start, ["hipblaslt-off"], "hang", said.append)
    assert file_of(start).read_bytes() == before and os.listdir(file_of(start).parent) == [file_of(start).name]
    assert says(said[0], "rules/the-disk-is-full")


def test_without_somebody_to_tell_it_goes_to_standard_error(
    start: Situation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("", encoding="utf-8")
    keep(replace(start, app_dir=str(blocked)), [MACHINE], "hang")
    assert str(blocked) in capsys.readouterr().err


def test_forget_deletes_every_stack_s_and_nothing_else(start: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(start.app_dir)
    keep(start, [MACHINE], "hang", mute)
    keep(situation_here(of_size()), [OF_SIZE], "out-of-memory", mute)
    other = replace(start, facts=with_torch(XTX, version="2.14.0"))
    keep(other, ["hipblaslt-off"], "canary", mute)
    (folder / "changes-damaged.json").write_text("{", encoding="utf-8")
    (folder / "selftest-0.json").write_text("{}", encoding="utf-8")
    gone = forget(folder)
    assert sorted(entry.change for _, entries in gone for entry in entries) == [
        "hipblaslt-off", OF_SIZE, MACHINE,
    ]  # fmt: skip
    assert (folder / "changes-damaged.json", ()) in gone and len(gone) == 3
    assert os.listdir(folder) == ["selftest-0.json"]
    assert forget(folder) == [] and situation_here(of_size()).changes == ()


def test_forget_where_there_is_no_folder(tmp_path: Path) -> None:
    assert forget(tmp_path / "none") == []


def test_notices_name_what_is_in_force_since_when_why_and_how_to_undo_it(start: Situation) -> None:
    run = start
    for change in (OF_SIZE, OF_SIZE, MACHINE):
        run = make(run, change, "out-of-memory" if change == OF_SIZE else "hang")
    made = situation_here(of_size())
    halved, sdma, undo = notices(made)
    assert (
        changes_by_id()[OF_SIZE].text in halved
        and f"{OF_SIZE}, 2 times" in halved
        and "times" not in sdma
        and "out-of-memory" in halved
        and "batch 4" in halved
    )
    assert (
        changes_by_id()[MACHINE].text in sdma
        and "hang" in sdma
        and "since 20" in sdma
        and mitigation_store.FORGET in undo
    )
    assert len(notices(situation_here(of_size(batch_size=1)))) == 2, "what is for another size is not in force"
    assert notices(start) == []


def test_a_workload_names_only_what_the_family_reads() -> None:
    sections = {"model": {"family": "toy-text", "name_or_path": "x"}, "data": {"path": "x"}, "train": {"epochs": 1}}
    text = recipe_from(sections, TOYS)
    assert all("px" not in workload_of(text, size).text for size in ("training", "previews"))
    assert all("px" in workload_of(of_size(), size).text for size in ("training", "previews"))


def test_workloads_differ_in_what_decides_memory_and_in_nothing_else() -> None:
    made = of_size()
    ids = {workload_of(made, "training").id}
    for key, value in IN_TRAINING.items():
        ids.add(workload_of(changed(made, key, value), "training").id)
    assert len(ids) == 1 + len(IN_TRAINING)
    for key, value in ALL_VALUES.items():
        if key not in IN_TRAINING:
            assert workload_of(changed(made, key, value), "training") == workload_of(made, "training"), key
        same = workload_of(changed(made, key, value), "previews") == workload_of(made, "previews")
        assert same == (key not in IN_PREVIEWS), key


def test_each_key_of_a_recipe_was_decided_whether_it_is_part_of_the_size() -> None:
    assert IN_TRAINING.keys() <= ALL_VALUES.keys() and not IN_TRAINING.keys() & set(NO_PART_OF_THE_SIZE)
    assert {*IN_TRAINING, *NO_PART_OF_THE_SIZE} >= {key for key in KEYS if "." in key}


def test_tiles_for_previews_that_do_not_fit_are_for_previews_of_that_size_only(start: Situation) -> None:
    """And never for the images that are trained on."""
    large = changed(of_size(), "sample.width", 4096)
    (change,) = candidates("out-of-memory", "preview", replace(start, recipe=large))
    make(replace(start, recipe=large), change.id, "out-of-memory")
    again = plan(situation_here(large)).settings
    assert again.preview_tiling and not again.image_tiling
    assert plan(situation_here(of_size())).settings == plan(start).settings
    assert plan(situation_here(changed(large, "lora.rank", 8))).settings.preview_tiling, "nothing that previews take"
    assert says(notices(situation_here(large))[0], "rules/4096-x-1024-px")


def test_tiles_for_training_images_are_for_runs_of_that_size_whatever_their_previews(start: Situation) -> None:
    (change,) = candidates("out-of-memory", "cache", start)
    make(start, change.id, "out-of-memory")
    for recipe_ in (of_size(), changed(of_size(), "sample.width", 4096)):
        again = plan(situation_here(recipe_)).settings
        assert again.image_tiling and not again.preview_tiling
    assert not plan(situation_here(changed(of_size(), "data.resolution", 512))).settings.image_tiling


def test_a_workload_s_name_is_the_same_in_every_version() -> None:
    """Otherwise an update would lose the remembered facts."""
    found = workload_of(of_size(), "training")
    assert found.text == "builtin:tiny-sdxl, 1024 px, batch 4, LoRA rank 16 (attention-mlp), precision auto"
    assert found.id == "aa7083ec7eb9d1c7"


@given(
    made=st.lists(st.tuples(st.sampled_from(sorted(changes_by_id())), st.sampled_from([1, 2, 4])), max_size=12),
    asked=st.sampled_from([1, 2, 4]),
)
def test_any_history_is_recalled_as_a_counting_model_says(
    made: list[tuple[str, int]], asked: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three runs of different sizes that fail in turns."""
    own = replace(situation(XTX), app_dir=str(tmp_path_factory.mktemp("app")))
    runs = {batch: replace(own, recipe=of_size(batch_size=batch)) for batch in (1, 2, 4)}
    model: list[str] = []
    for change, batch in made:
        runs[batch] = make(runs[batch], change)
        row = changes_by_id()[change]
        times = min(runs[batch].changes.count(change), row.most)
        if (row.size != "training" or batch == asked) and model.count(change) < times:
            model.append(change)
    key = key_of(own.facts, own.selection)
    assert in_force(recall(Path(own.app_dir), key), workloads_of(of_size(batch_size=asked))) == tuple(model)


def test_what_cannot_be_deleted_is_an_error_in_words(start: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(start, [MACHINE], "hang", mute)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError) as met:
        forget(Path(start.app_dir))
    assert met.value.where == str(file_of(start))


def test_a_file_that_says_the_same_ten_thousand_times_is_in_force_as_often_as_it_can_be(start: Situation) -> None:
    keep(start, [MACHINE], "hang", mute)
    whole = json.loads(file_of(start).read_text(encoding="utf-8"))
    (entry,) = whole["entries"]
    many = [{**entry, "seen": "\x1b[2J\nhang"}] * 10_000 + [{**entry, "change": OF_SIZE}] * 20_000
    file_of(start).write_text(json.dumps({**whole, "entries": many}), encoding="utf-8")
    again = situation_here(of_size())
    assert again.changes == (MACHINE, *[OF_SIZE] * 16)
    assert plan(again).settings.micro_batch_parts == 2**16
    assert all(text.isprintable() for text in notices(again))
