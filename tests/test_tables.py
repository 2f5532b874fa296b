"""Tables of the package as files: each one reads, and a broken row is named with its file, number, name and key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

import lora_rocm
from lora_rocm.commands.program_folders import FolderTable
from lora_rocm.dataset.rows.loss_keys import LossKey
from lora_rocm.dataset.sources.file_kinds import FileKinds
from lora_rocm.device import torch_errors
from lora_rocm.doctor import cures, finding, known_bad, selftest_checks, software_checks
from lora_rocm.errors import MachineError
from lora_rocm.families.objectives.schedulers import SchedulerTable
from lora_rocm.foundation import redact
from lora_rocm.foundation.tables import Functions, read_rows, read_table
from lora_rocm.hardware.archs import ArchTable
from lora_rocm.hardware.eight_bit import EightBitTable
from lora_rocm.hardware.pci import PciTable
from lora_rocm.hardware.wheels import WheelTable
from lora_rocm.importing.registry import MODULES
from lora_rocm.importing.rows import TrainerTable
from lora_rocm.model_files.adapter_parts import OtherTable
from lora_rocm.model_files.adapter_spellings import SpellingTable
from lora_rocm.model_files.models import ModelTable
from lora_rocm.model_files.public_metadata import PublicFields
from lora_rocm.model_files.readers import ReaderTable
from lora_rocm.model_files.recognise_adapter import AdapterTable
from lora_rocm.planning.format_errors import FormatError
from lora_rocm.recipe.eight_bit import Quality
from lora_rocm.recipe.foreign import ForeignTable
from lora_rocm.recipe.optimizer_args import OptimizerArgTables as OptimizerArguments
from lora_rocm.recipe.peer_names import PeerNames
from lora_rocm.recipe.presets import PresetTable
from lora_rocm.rules import (
    amd_rules,
    general_rules,
    harmful_values,
    kernel_log,
    memory_rules,
    mitigations,
    selftest_rules,
    tuned_rules,
)
from lora_rocm.rules.rule import Harm, MachineRule
from tests.wording import saying

PACKAGE = Path(lora_rocm.__file__).parent
TABLES: dict[str, tuple[Callable[..., object], type, Functions]] = {
    "commands/program_folders.toml": (read_table, FolderTable, {}),
    "dataset/sources/file_kinds.toml": (read_table, FileKinds, {}),
    "dataset/rows/loss_keys.toml": (read_rows, LossKey, {}),
    "device/torch_errors.toml": (read_table, torch_errors.Messages, {}),
    "doctor/cures.toml": (read_rows, cures.Family, {}),
    "doctor/findings.toml": (read_rows, finding.Finding, {}),
    "doctor/known_bad.toml": (read_table, known_bad.BadTable, known_bad.FUNCTIONS),
    "foundation/redact.toml": (read_rows, redact.PrivatePattern, {}),
    "doctor/selftest_checks.toml": (read_rows, selftest_checks.SelftestGroup, {}),
    "doctor/software_checks.toml": (read_table, software_checks.SoftwareTable, software_checks.FUNCTIONS),
    "families/objectives/schedulers.toml": (read_table, SchedulerTable, {}),
    "hardware/archs.toml": (read_table, ArchTable, {}),
    "hardware/eight_bit.toml": (read_table, EightBitTable, {}),
    "hardware/pci.toml": (read_table, PciTable, {}),
    "hardware/wheels.toml": (read_table, WheelTable, {}),
    **{f"importing/trainers/{name}.toml": (read_table, TrainerTable, {}) for name in (*MODULES, "transformers")},
    "model_files/adapter_parts.toml": (read_table, OtherTable, {}),
    "model_files/adapter_spellings.toml": (read_table, SpellingTable, {}),
    "model_files/recognise_adapter.toml": (read_table, AdapterTable, {}),
    "model_files/models.toml": (read_table, ModelTable, {}),
    "model_files/public_metadata.toml": (read_table, PublicFields, {}),
    "model_files/readers.toml": (read_table, ReaderTable, {}),
    "planning/format_errors.toml": (read_rows, FormatError, {}),
    "recipe/eight_bit.toml": (read_rows, Quality, {}),
    "recipe/foreign.toml": (read_table, ForeignTable, {}),
    "recipe/optimizer_args.toml": (read_table, OptimizerArguments, {}),
    "recipe/peer_names.toml": (read_table, PeerNames, {}),
    "recipe/presets.toml": (read_table, PresetTable, {}),
    "rules/amd_rules.toml": (read_table, amd_rules.AmdTable, amd_rules.FUNCTIONS),
    "rules/general_rules.toml": (read_rows, MachineRule, general_rules.FUNCTIONS),
    "rules/harmful_values.toml": (read_rows, Harm, harmful_values.TESTS),
    "rules/kernel_log.toml": (read_rows, kernel_log.LogPattern, {}),
    "rules/memory_rules.toml": (read_table, memory_rules.MemoryTable, memory_rules.FUNCTIONS),
    "rules/mitigations.toml": (read_table, mitigations.MitigationTable, mitigations.FUNCTIONS),
    "rules/selftest_rules.toml": (read_table, selftest_rules.SelftestTable, selftest_rules.FUNCTIONS),
    "rules/tuned_rules.toml": (read_rows, MachineRule, tuned_rules.FUNCTIONS),
}


VENDORED = "static/vendored/vendored.toml"
OF_THE_PAGE = {"page_parts/texts.toml", f"page_parts/{VENDORED}", f"ui/{VENDORED}"}
"""Other functions read them. Their tests are in tests/ui."""


def test_every_table_of_the_package_is_in_the_list() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.toml")}
    assert found - OF_THE_PAGE == TABLES.keys() and found >= OF_THE_PAGE


@pytest.mark.parametrize("name", TABLES)
def test_a_table_reads_and_a_broken_row_of_each_array_is_named(name: str, tmp_path: Path) -> None:
    read, kind, functions = TABLES[name]
    text = (PACKAGE / name).read_text(encoding="utf-8")
    assert read(PACKAGE / name, kind, functions)

    def where(*broken: str) -> str:
        path = tmp_path / "broken.toml"
        path.write_text("".join(broken), encoding="utf-8")
        with pytest.raises(MachineError) as caught:
            read(path, kind, functions)
        assert caught.value.where.startswith(f"{path}, ")
        return caught.value.where.removeprefix(f"{path}, ")

    for array in set(re.findall(r"^(\w+) = \[\n    \{ ", text.partition("\n[[")[0], re.MULTILINE)):
        head, mark, rest = text.partition(f"\n{array} = [\n    {{ ")
        assert where(head, mark, "no_such_key = 1, ", rest) == f"{array}, 1, no_such_key"
    for array in set(re.findall(r"^\[\[(\w+)\]\]$", text, re.MULTILINE)):
        head, mark, row = text.rpartition(f"[[{array}]]\n")
        number, named = text.count(mark), re.match('id = "(.*)"', row)
        name_of_row = f" ({named[1]})" if named is not None else ""
        assert where(head, mark, "no_such_key = 1\n", row) == f"{array}, {number}{name_of_row}, no_such_key"


@dataclass(frozen=True)
class When:
    systems: tuple[Literal["linux", "windows"], ...] = ()
    hex: int = 0


@dataclass(frozen=True)
class Computed:
    by: Callable[[int], int]


@dataclass(frozen=True)
class Row:
    id: str
    value: str | Computed = "none"
    when: When = field(default_factory=When)
    below: str | None = None
    pairs: tuple[tuple[int, ...], ...] = ()
    most: float = 1.0


@dataclass(frozen=True)
class Small:
    row: tuple[Row, ...]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def double(number: int) -> int:
    return 2 * number


def read(tmp_path: Path, text: str) -> Small:
    path = tmp_path / "small.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path, Small, {"double": double})


GOOD = """
names = { a = ["b", "c"] }
row = [
    { id = "first", value = { by = "double" }, when = { systems = ["linux"], hex = 0x83 }, below = "7.0" },
    { id = "second", value = "1", pairs = [[1, 2], [3]], most = 2.5 },
]
"""


def test_rows_are_dataclasses(tmp_path: Path) -> None:
    first = Row("first", Computed(double), When(("linux",), 0x83), "7.0")
    assert read(tmp_path, GOOD) == Small((first, Row("second", "1", pairs=((1, 2), (3,)), most=2.5)), {"a": ("b", "c")})


@pytest.mark.parametrize(
    ("good", "bad", "where"),
    [
        ('"double"', '"triple"', "row, 1 (first), value, by"),
        ('"linux"', '"hurd"', "row, 1 (first), when, systems, 1"),
        ('"7.0"', "7.0", "row, 1 (first), below"),
        ("0x83", "true", "row, 1 (first), when, hex"),
        ("hex = 0x83", "octal = 1", "row, 1 (first), when, octal"),
        ("[3]", '["3"]', "row, 2 (second), pairs, 2, 1"),
        ('id = "second", ', "", "row, 2, id"),
        ('["b", "c"]', '"b"', "names, a"),
        ("most = 2.5", "most = 2", "row, 2 (second), most"),
        ("row = [", "rows = [", "rows"),
        (" },\n]", " },", ""),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(good: str, bad: str, where: str, tmp_path: Path) -> None:
    assert good in GOOD
    with pytest.raises(MachineError) as caught:
        read(tmp_path, GOOD.replace(good, bad))
    assert caught.value.code == "table-invalid"
    assert caught.value.where == ", ".join(filter(None, (str(tmp_path / "small.toml"), where)))


def test_a_file_of_rows_holds_one_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    path.write_text('[[row]]\nid = "first"\n[[row]]\nid = "second"\n', encoding="utf-8")
    assert [row.id for row in read_rows(path, Row)] == ["first", "second"]
    path.write_text("[[row]]\nid = 1\n", encoding="utf-8")
    with pytest.raises(MachineError, check=saying("tables/none-of-the-values")) as caught:
        read_rows(path, Row)
    assert caught.value.where == f"{path}, row, 1 (1), id"
    path.write_text('more = 1\n[[row]]\nid = "first"\n', encoding="utf-8")
    with pytest.raises(MachineError, check=saying("tables/not-one-array")):
        read_rows(path, Row)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, check=saying("tables/no-such-file")) as caught:
        read_table(tmp_path / "gone.toml", Small)
    assert caught.value.where == str(tmp_path / "gone.toml")
