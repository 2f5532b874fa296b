"""Each setting ends with exactly one outcome, and each recipe key has one value."""

from __future__ import annotations

import pytest

from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.rows import MappingRow, TrainerTable
from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.translator import Function, Translator, plain_key

ROWS = (
    MappingRow(("dim",), "same", ours="lora.rank"),
    MappingRow(("net.dim",), "same", ours="lora.conv_rank"),
    MappingRow(("alpha",), "convert", function="double"),
    MappingRow(("cache",), "not-needed", note="always"),
    MappingRow(("odd",), "unsupported", note="odd", neutral=(0, "none")),
    MappingRow(("hub",), "unsupported", note="hub", changes_weights=False),
)


def translator(*settings: Setting, **defaults: Value) -> Translator:
    table = TrainerTable("x", "1", ROWS, defaults)  # type: ignore[arg-type]  # plain values only
    return Translator(table, ConfigFiles(()), settings)


def given(key: str, value: Value, line: int = 1) -> Setting:
    return Setting(key, value, "f", line)


def double(t: Translator, setting: Setting) -> None:
    t.take("lora.alpha", 2 * int(str(setting.value)), setting, note="twice")


FUNCTIONS: dict[str, Function] = {"double": double}


def rows(t: Translator) -> list[tuple[str, str, str, bool]]:
    return [(row.setting.key, row.outcome, row.ours, row.changes_weights) for row in t.outcomes]


@pytest.mark.parametrize(
    ("setting", "outcome", "ours", "weights"),
    [
        (given("dim", 4), "taken", "lora.rank", False),
        (given("a[3].DIM", 4), "taken", "lora.rank", False),
        (given("net.dim", 4), "taken", "lora.conv_rank", False),
        (given("alpha", 4), "changed", "lora.alpha", False),
        (given("cache", True), "not-needed", "", False),
        (given("odd", 3), "unsupported", "", True),
        (given("odd", "none"), "not-needed", "", False),
        (given("odd", None), "not-needed", "", False),
        (given("dim", ""), "not-needed", "", False),
        (given("hub", "a/b"), "unsupported", "", False),
        (given("never_heard_of", 3), "unsupported", "", True),
        (given("never_heard_of", False), "not-needed", "", False),
        (given("weight_decay", 0.1), "taken", "optim.weight_decay", False),
        (given("x_token", "secret"), "not-needed", "", False),
    ],
)
def test_the_outcome_of_a_setting(setting: Setting, outcome: str, ours: str, weights: bool) -> None:
    t = translator(setting)
    t.run_table(FUNCTIONS)
    assert rows(t) == [(setting.key, outcome, ours, weights)]
    assert list(t.values) == ([ours] if outcome in ("taken", "changed") else [])


def test_a_default_is_used_once_and_only_if_its_key_is_absent() -> None:
    t = translator(given("dim", 8), dim=4, alpha=1)
    t.run_table(FUNCTIONS)
    assert [(row.setting.is_default, row.ours, row.value) for row in t.outcomes] == [
        (False, "lora.rank", 8),
        (True, "lora.alpha", 2),
    ]


def test_a_default_that_was_already_used_does_not_run_again() -> None:
    t = translator(dim=4)
    default = t.setting("dim")
    assert default is not None and default is t.setting("dim") and default is t.default("dim")
    t.take("lora.conv_rank", 4, default)
    t.run_table(FUNCTIONS)
    assert rows(t) == [("dim", "taken", "lora.conv_rank", False)] and list(t.values) == ["lora.conv_rank"]


def test_a_default_that_is_lost_is_reported_if_it_changes_the_weights() -> None:
    t = translator(odd=3, hub="x")
    t.run_table(FUNCTIONS)
    assert rows(t) == [("odd", "unsupported", "", True)]


def test_the_last_of_two_lines_counts() -> None:
    t = translator(given("dim", 4, 1), given("dim", 8, 2))
    t.run_table(FUNCTIONS)
    assert [(row.setting.line, row.outcome) for row in t.outcomes] == [(1, "not-needed"), (2, "taken")]
    assert t.values["lora.rank"].value == 8


def test_a_second_value_of_a_recipe_key_is_lost() -> None:
    t = translator(given("dim", 4), given("lora.rank", 8))
    t.take("lora.rank", 4, t.settings[0])
    t.take("lora.rank", 8, t.settings[1])
    assert rows(t)[1] == ("lora.rank", "unsupported", "lora.rank", True) and t.values["lora.rank"].value == 4


def test_the_first_outcome_of_a_setting_stays() -> None:
    t = translator(given("dim", 4))
    t.skip(t.settings[0], "first")
    t.lose(t.settings[0], "second")
    assert [row.note for row in t.outcomes] == ["first"]


def test_a_secret_is_not_written() -> None:
    t = translator(given("dim", "hf_abcdefghijklmnopqrstuvwxyz1234"))
    t.run_table(FUNCTIONS)
    assert rows(t) == [("dim", "not-needed", "", False)] and not t.values


def test_withdrawing_a_key() -> None:
    t = translator(given("dim", 4), given("cache", 1), alpha=1)
    t.run_table(FUNCTIONS)
    t.withdraw("lora.rank", "refused")
    t.withdraw("lora.alpha", "idle", is_lost=False)
    assert rows(t) == [("dim", "unsupported", "lora.rank", True), ("cache", "not-needed", "", False)] and not t.values


def test_withdrawing_a_section() -> None:
    t = translator(given("a", 1), given("b", 1))
    t.take("data.sources[0].path", "x", t.settings[0])
    t.take("data.sources[0].repeats", 2, t.settings[1])
    t.take("data.sources[1].path", "y")
    t.withdraw("data.sources[0]", "refused")
    assert list(t.values) == ["data.sources[1].path"] and {row.outcome for row in t.outcomes} == {"unsupported"}


def test_looking_keys_up() -> None:
    t = translator(given("a[0].Dim", 4), given("b.dim", 5), given("b.c", 6), dim=9)
    assert t.given("a.dim") is t.settings[0] and t.given_exactly("A[0].dim") is t.settings[0]
    assert t.given("x", "b.dim") is t.settings[1] and t.given("x") is None and t.value("x") is None
    assert t.value("dim") == 9 and [setting.key for setting in t.below("b")] == ["b.dim", "b.c"]
    assert plain_key("A[0].b[12].C") == "a.b.c"
