"""Did-you-mean: it helps with names of other trainers and slips, and never proposes another unit or another meaning."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.adapter_sections import ADAPTERS, LoraSection
from lora_rocm.recipe.explain import explain
from lora_rocm.recipe.kinds import kinds_of, recipe_from
from lora_rocm.recipe.optim_sections import OPTIMIZERS
from lora_rocm.recipe.optimizer_args import ARGUMENTS
from lora_rocm.recipe.peer_names import advice, peer_names
from lora_rocm.recipe.schema import TrainSection
from lora_rocm.recipe.sections import ALL_SAMPLERS
from lora_rocm.recipe.source_sections import DataSource
from lora_rocm.recipe.suggest import (
    NEED_THEIR_SECTION,
    SPEAK_ALONE,
    _known_words,
    _words,
    all_keys,
    is_portable,
    osa_distance,
    section_class,
    suggest,
    unit_of,
)
from lora_rocm.recipe.yaml_tree import dotted
from tests.recipe.peer_keys import NOTHING_LIKE_IT, ONLY_WITH_THEIR_SECTION, RIGHT
from tests.wording import Worded, holds, worded

RECIPE = kinds_of({}).recipe
SAME_VALUE, ADVICE = peer_names().same_value, advice()
KEYS = tuple(all_keys(RECIPE))
MINIMAL: dict[str, Any] = {
    "model": {"name_or_path": "builtin:tiny-sdxl"},
    "data": {"path": "pics"},
    "train": {"max_train_steps": 10},
}
LEAVES = {key.rpartition(".")[2] for key in KEYS}
TOP, LORA, TRAIN = (list(model.model_fields) for model in (RECIPE, LoraSection, TrainSection))


def siblings_of(section: str) -> list[str]:
    if section.startswith("data.sources"):
        return list(DataSource.model_fields)
    model = section_class(RECIPE.model_fields[section].annotation) if section in RECIPE.model_fields else None
    return list(model.model_fields) if model is not None else [] if section else TOP


SECTIONS = ("", *TOP)


def answer(name: str, section: str) -> str:
    return suggest(name, siblings_of(section), section, "...", RECIPE)


def proposed(name: str, section: str) -> list[str]:
    """The keys that are proposed; none where the answer is a sentence or nothing."""
    found = re.match(r"Did you mean (.*?)\?", answer(name, section))
    return found[1].split(" or ") if found else []


def test_the_tables_point_at_keys_that_exist() -> None:
    assert set(SAME_VALUE.values()) <= set(KEYS)
    sections = {key.partition(".")[0] for key in KEYS}
    of_all = {key for name in FAMILIES.names for key in all_keys(kinds_of({"model": {"family": name}}).recipe)}
    of_all.add(dotted(ARGUMENTS))  # the loader replaces it by keys
    for name, sentence in ADVICE.items():
        named = [word for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", sentence) if word.partition(".")[0] in sections]
        assert set(named) <= of_all, (name, named)


def test_the_tables_do_not_hide_a_key_of_ours_and_do_not_contradict_each_other() -> None:
    assert not {name for name in (*SAME_VALUE, *ADVICE) if name in LEAVES} - {
        "weight_dtype"
    }  # OneTrainer's: the base's
    assert not SAME_VALUE.keys() & ADVICE.keys()


def test_a_name_in_the_table_has_the_unit_of_its_key() -> None:
    other = {name for name, key in SAME_VALUE.items() if unit_of(name) != unit_of(key)}
    # the ratio of two sides; a factor is a ratio; a number of files, saved by steps
    assert other == {"aspect_ratio_bucketing", "learning_rate_min_factor", "max_step_saves_to_keep"}


@pytest.mark.parametrize(
    ("name", "siblings", "section", "expected"),
    [
        ("network_dim", TOP, "", worded("recipe/did-you-mean-lora-rank-other-trainers")),
        ("unet_lr", TRAIN, "train", worded("recipe/did-you-mean-optim-learning-rate-other")),
        ("snr_gamma", TRAIN, "train", worded("recipe/did-you-mean-objective-min-snr-gamma")),
        ("learning_rate", TRAIN, "train", worded("recipe/did-you-mean-optim-learning-rate")),
        ("seed", LORA, "lora", worded("recipe/did-you-mean-train-seed-or-sample")),
        ("rnk", LORA, "lora", worded("recipe/did-you-mean-lora-rank")),
        ("Rank", LORA, "lora", worded("recipe/did-you-mean-lora-rank")),
        ("use-dora", LORA, "lora", worded("recipe/did-you-mean-lora-use-dora")),
        ("num_repeats", ["path", "repeats"], "data.sources[0]", worded("recipe/did-you-mean-data-sources-0-repeats")),
        ("max_train_step", LORA, "lora", worded("recipe/did-you-mean-train-max-train-steps")),
        ("batchsize", TRAIN, "train", worded("recipe/did-you-mean-train-batch-size")),
        ("shufle_captions", LORA, "lora", worded("recipe/did-you-mean-data-shuffle-caption")),
        ("cache_latents", TOP, "", ADVICE["cache_latents"]),
        ("zzz", ["a", "b"], "lora", "Keys of lora: a, b."),
        ("zzz", ["a", "b"], "", worded("recipe/keys-at-the-top-a-b")),
    ],
)
def test_suggestions(name: str, siblings: list[str], section: str, expected: str | Worded) -> None:
    assert holds(suggest(name, siblings, section, "...", RECIPE), expected)


@pytest.mark.parametrize(
    ("section", "name", "never", "words"),
    [
        ("train", "steps", "sample.steps", worded("recipe/did-you-mean-train-max-train-steps")),
        ("train", "dtype", "output.dtype", worded("recipe/did-you-mean-train-mixed-precision")),
        ("train", "vae_batch_size", "train.batch_size", worded("recipe/leave-it-out")),
        ("train", "noise_offset_type", "Did you mean", "For Original set objective.noise_offset"),
        ("train", "max_train_minutes", "max_train_steps?", "not minutes"),
        ("output", "type", "output.dtype", "Keys of output"),
        ("lora", "dim_from_weights", "Did you mean", "lora.rank: auto"),
        ("lora", "unit", "Did you mean", "lora.type: lokr"),
        ("model", "weight_dtype", "lora.weight_dtype", "follows train.mixed_precision"),
        ("optim", "lr_scheduler_type", "Did you mean", "its options as keys of optim"),
        ("", "text_encoder", "Did you mean", "lora.train_text_encoder: true"),
        ("lora", "use_lora", "Did you mean", "Keys of lora"),
        ("data", "no_shuffle_caption", "Did you mean", "Keys of data"),
        ("data", "disable_bucket", "Did you mean", "Keys of data"),
        ("data", "bucket_min_aspect", "Did you mean", "Keys of data"),
        ("data", "bucket_no_upscale", "Did you mean", "the opposite"),
        ("optim", "text_encoder_2_learning_rate", "Did you mean", "Keys of optim"),
        ("output", "save_last_n_steps", "Did you mean", "a number of files"),
        ("", "every_n_steps", "Did you mean", worded("recipe/keys-at-the-top")),
        ("train", "width", "sample.width", "Keys of train"),
        ("output", "path", "data.path", "Keys of output"),
    ],
)
def test_another_unit_or_meaning_is_never_proposed(section: str, name: str, never: str, words: str | Worded) -> None:
    found = answer(name, section)
    assert never not in found and holds(found, words)


@pytest.mark.parametrize("section", SECTIONS)
def test_keys_of_other_trainers_have_the_right_answer_or_none(section: str) -> None:
    siblings = siblings_of(section)
    for name, right in RIGHT.items():
        if name not in siblings:
            assert " or ".join(proposed(name, section)) == right, name
    for name in NOTHING_LIKE_IT:
        assert name in siblings or not proposed(name, section), name
    for name, by_section in ONLY_WITH_THEIR_SECTION.items():
        if name not in siblings:
            assert (
                proposed(name, section) == [by_section[section]]
                if section in by_section
                else not proposed(name, section)
            ), name


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_of_ours_in_another_section_is_proposed_as_itself(section: str) -> None:
    for leaf in LEAVES - set(siblings_of(section)) - {"weight_dtype", *ONLY_WITH_THEIR_SECTION}:
        found = proposed(leaf, section)
        assert {key.rpartition(".")[2] for key in found} <= {leaf} or unit_of(leaf) == unit_of(found[0]), leaf
        if is_portable(leaf):
            assert all(key in found for key in KEYS if key.rpartition(".")[2] == leaf and "." in key), leaf


def test_each_key_of_one_word_was_decided() -> None:
    assert SPEAK_ALONE <= {leaf for leaf in LEAVES if "_" not in leaf} and NEED_THEIR_SECTION <= LEAVES


VOCABULARY = sorted(
    {word for key in (*LEAVES, *NOTHING_LIKE_IT) for word in key.split("_")} | {"no", "not", "min", "2"}
)
OPPOSITES = {"no", "not", "min", "max", "disable", "un"}


@given(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=4), st.sampled_from(SECTIONS))
def test_what_is_proposed_by_spelling_has_the_same_unit_numbers_and_words(words: list[str], section: str) -> None:
    name = "_".join(words)
    if name in SAME_VALUE or f"{section}.{name}" in SAME_VALUE or name in siblings_of(section):
        return
    for key in proposed(name, section):
        leaf = key.rpartition(".")[2]
        assert unit_of(leaf) == unit_of(name)
        assert re.findall(r"\d", leaf) == re.findall(r"\d", name)
        assert OPPOSITES & set(leaf.split("_")) == OPPOSITES & set(words)
        assert len(leaf.split("_")) == len(words) or abs(len(leaf.replace("_", "")) - len("".join(words))) <= 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dataset", "'x'", "Write data.sources: [{dataset: 'x'}]"),
        ("split", "'test'", "Write data.sources: [{dataset: ..., split: 'test'}]"),
        ("caption_column", "'text'", "Write data.sources: [{path: ..., caption_column: 'text'}]"),
    ],
)
def test_a_dataset_is_an_entry_of_the_sources(name: str, value: str, expected: str) -> None:
    assert suggest(name, siblings_of("data"), "data", value, RECIPE) == expected


LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def slips(word: str) -> set[str]:
    """Every word within one slip of the keyboard: letters exchanged, omitted, inserted, replaced."""
    exchanged = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    left_out = {word[:at] + word[at + 1 :] for at in range(len(word))}
    put_in = {word[:at] + letter + word[at:] for at in range(len(word) + 1) for letter in LETTERS}
    replaced = {word[:at] + letter + word[at + 1 :] for at in range(len(word)) for letter in LETTERS}
    return (exchanged | left_out | put_in | replaced) - {word, ""}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_with_one_slip_has_its_hint(section: str) -> None:
    """Of each key a few slips of every kind. A slip may be another name that is known, and has its answer then."""
    siblings, rng, here = siblings_of(section), random.Random(section), f"{section}." if section else ""
    for key in siblings:
        for name in rng.sample(sorted(slips(key)), min(8, len(slips(key)))):
            known = name in SAME_VALUE or f"{section}.{name}" in SAME_VALUE or name in ADVICE or name in LEAVES
            if known or _known_words(RECIPE).issuperset(_words(name)):
                continue
            other_unit = not unit_of(name) <= unit_of(key)
            other_number = [*filter(str.isdigit, name)] != [*filter(str.isdigit, key)]  # it means another key
            found = proposed(name, section)
            rivals = [own for own in siblings if osa_distance(name, own) == 1]
            assert here + key in found or other_unit or other_number or len(rivals) > 2, (name, key, found)


def test_the_distance_counts_an_exchange_as_one() -> None:
    assert [osa_distance("rnak", other) for other in ("rank", "rnak", "rn", "")] == [1, 0, 2, 4]
    assert osa_distance("ca", "abc") == 3, "no letter is moved twice"


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_distance_is_symmetric_and_zero_for_the_same(first: str, second: str) -> None:
    assert osa_distance(first, second) == osa_distance(second, first)
    assert (osa_distance(first, second) == 0) == (first == second)
    assert (osa_distance(first, second) <= 1) == (
        first == second or second in slips(first) or first in slips(second) or len(first + second) == 1
    )


def test_a_value_with_one_slip_has_its_hint() -> None:
    choices = {
        ("optim", "optimizer"): tuple(OPTIMIZERS),
        ("lora", "type"): tuple(ADAPTERS),
        ("sample", "sampler"): ALL_SAMPLERS,
        ("data", "caption_fallback"): ("filename", "folder", "trigger", "empty", "error"),
    }
    for key, names in choices.items():
        for name in names:
            swapped = {word for word in slips(name) if sorted(word) == sorted(name)} - set(names)
            for wrong in sorted(swapped):
                with pytest.raises(ValidationError) as caught:
                    recipe_from({**MINIMAL, key[0]: {**MINIMAL.get(key[0], {}), key[1]: wrong}})
                data = {**MINIMAL, key[0]: {**MINIMAL.get(key[0], {}), key[1]: wrong}}
                problems = explain(caught.value, data, dotted, kinds_of(data))
                fixes = [problem.fix for problem in problems if problem.where == ".".join(key)]
                assert fixes and name in fixes[0], (wrong, fixes)
