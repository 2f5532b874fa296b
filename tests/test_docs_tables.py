"""The tables about machines in the documentation."""

from __future__ import annotations

import pytest

from lora_rocm.hardware.archs import ARCHS
from lora_rocm.rules.environment import rules as all_rules
from lora_rocm.rules.harmful_values import harms as all_harms
from lora_rocm.rules.rule import When
from scripts.docs_pages import DOCS, WITH_TABLES
from scripts.docs_tables import TABLES, filled, hardware, harms, rules, where
from tests.wording import Worded, says, worded

PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in WITH_TABLES}


def test_the_pages_hold_the_tables() -> None:
    for name, table in TABLES.items():
        assert sum(f"<!-- {name} -->\n{table()}\n<!-- /{name} -->" in text for text in PAGES.values()) == 1, name


def test_what_is_out_of_date_is_made_anew_and_the_rest_is_kept() -> None:
    old = "before\n<!-- rules -->\nan old table\n<!-- /rules -->\nafter <!-- unknown -->"
    assert filled(old) == f"before\n<!-- rules -->\n{rules()}\n<!-- /rules -->\nafter <!-- unknown -->"
    assert filled("no marks") == "no marks"


def test_every_row_is_there_with_reason_and_source() -> None:
    for rule in all_rules():
        (line,) = [line for line in rules().splitlines() if line.startswith(f"| `{rule.id}` |")]
        assert rule.why in line and rule.source in line.replace("&lt;", "<")
    assert len(harms().splitlines()) == len(all_harms()) + 2
    assert all(harm.what in harms() and harm.source in harms() for harm in all_harms())


def test_the_hardware_table_is_honest() -> None:
    lines = {arch.gfx: line for arch in ARCHS for line in hardware().splitlines() if f"| {arch.gfx} |" in line}
    assert set(lines) == {arch.gfx for arch in ARCHS}
    assert all(line.endswith("| not yet |") for line in lines.values())
    assert all(arch.reported in lines[arch.gfx] for arch in ARCHS)
    assert "| pytorch 7.2 | amd 7.14? |" in lines["gfx1201"]
    assert says(lines["gfx906"], "docs_tables/no-no") and "| CPU instead | CPU instead |" in lines["gfx1036"]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_tables(name: str) -> None:
    lines = TABLES[name]().splitlines()
    bars = {line.replace(r"\|", "").count("|") for line in lines}
    assert len(bars) == 1 and set(lines[1]) == {"|", "-", " "}


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (When(), worded("docs_tables/every-amd-gpu")),
        (When(amd=False), worded("docs_tables/everywhere")),
        (When(systems=("linux",), wsl=False, generations=("rdna3",), kernel_from="6.18", kernel_below="7.1"),
         worded("docs_tables/linux-not-wsl-rdna-3-kernel-from")),
        (When(generations=("rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4"), unknown_too=True, safe_profile=True),
         worded("docs_tables/rdna-and-unknown-gpus-profile-safe")),
        (When(gfx=("gfx1031",), torch_below="2.12", lacks_kernels=True, wheel_has="gfx1030"),
         worded("docs_tables/gfx1031-torch-below-2-12-torch-has")),
        (When(systems=("linux",), integrated=True), worded("docs_tables/linux-integrated-gpus")),
        (When(several_gpus=True, several_ranks=False, hip_from="7.0", aotriton_from="0.11"),
         worded("docs_tables/hip-from-7-0-aotriton-from-0")),
    ],
)  # fmt: skip
def test_conditions_in_words(when: When, words: Worded) -> None:
    assert where(when) == words


def test_angle_brackets_cannot_become_tags() -> None:
    page = PAGES["reference/environment.md"]
    assert "miopen/&lt;gfx>" in page and "`HSA_OVERRIDE_GFX_VERSION_<node of the APU>`" in page
