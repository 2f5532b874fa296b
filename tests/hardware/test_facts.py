"""Facts in files: read exactly, and refused with the place where they are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lora_rocm
from lora_rocm.errors import UserError
from lora_rocm.hardware.facts import HostFacts, facts_from_json, load_facts
from tests.wording import Worded, saying, says, worded

LEAST: dict[str, Any] = {"origin": "a test", "system": "linux", "python": "3.12.3 64-bit", "cpu": "x", "cpu_count": 4}


def test_the_least_that_a_machine_is() -> None:
    assert facts_from_json(LEAST, "here") == HostFacts("a test", "linux", "3.12.3 64-bit", "x", 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": []}, worded("hardware/unknown-key-gpu")),
        ({"cpu_count": "4"}, worded("hardware/expected-a-whole-number-from-0-to")),
        ({"cpu_count": True}, worded("hardware/expected-a-whole-number")),
        ({"cpu_count": None}, worded("hardware/expected-a-whole-number")),
        ({"system": "beos"}, worded("hardware/expected-linux-or-windows-or-macos")),
        ({"memory_bytes": 1.5}, worded("hardware/expected-a-whole-number")),
        ({"gpus": {}}, worded("hardware/expected-a-list")),
        ({"gpus": [3]}, worded("hardware/expected-a-table-of-gpu")),
        ({"gpus": [{"vendor": "amd"}]}, worded("hardware/a-key-is-missing")),
        (
            {"gpus": [{"vendor": "amd", "name": "x", "gfx_source": "guess"}]},
            worded("hardware/kfd-or-hipinfo-or-pci-or-name"),
        ),
        ({"variables": {"A": 1}}, worded("hardware/expected-a-table-of-texts")),
        ({"libraries": []}, worded("hardware/expected-a-table-of-texts")),
        ({"linux": {"kernel": "6", "kfd": {"path": "/dev/kfd", "exists": 1}}}, worded("hardware/expected-a-truth")),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], said: Worded) -> None:
    with pytest.raises(UserError) as caught:
        facts_from_json({**LEAST, **change}, "my.json")
    assert says(str(caught.value), said)
    assert "my.json" in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, "text", [], [LEAST]])
def test_something_else_than_a_machine(value: object) -> None:
    with pytest.raises(UserError, check=saying("hardware/expected-a-table-of-hostfacts")):
        facts_from_json(value, "my.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00"])
def test_a_file_that_is_no_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not JSON"):
        load_facts(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=saying("hardware/cannot-be-read")):
        load_facts(tmp_path / "facts.json")


def test_where_the_fault_lies_is_said_to_the_key() -> None:
    with pytest.raises(UserError, match=r"gpus\[1\]: index"):
        facts_from_json(
            {**LEAST, "gpus": [{"vendor": "amd", "name": "a"}, {"vendor": "amd", "name": "b", "index": "1"}]}, "x"
        )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_that_windows_powershell_redirected_is_read(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({**LEAST, "cpu": "M\u00fcller"}, ensure_ascii=False), encoding=encoding)
    assert load_facts(file).cpu == "M\u00fcller"


def test_a_file_nested_too_deeply_is_no_bug_of_ours(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_facts(tmp_path / "deep.json")
    assert caught.value.code == "facts-no-json"


@pytest.mark.parametrize("number", [-1, 2**63])
def test_no_machine_has_such_a_number(number: int) -> None:
    with pytest.raises(UserError, check=saying("hardware/from-0-to")):
        facts_from_json({**LEAST, "memory_bytes": number}, "x")


def test_an_empty_text_is_an_unknown_fact() -> None:
    gpu = facts_from_json({**LEAST, "gpus": [{"vendor": "amd", "name": "x", "gfx": "", "driver": ""}]}, "x").gpus[0]
    assert gpu.gfx is None and gpu.driver is None


def test_missing_keys_are_named_without_python() -> None:
    with pytest.raises(UserError) as caught:
        facts_from_json({"origin": "x"}, "x")
    assert caught.value.what == worded("hardware/a-key-is-missing-system-python-cpu")


def test_an_architecture_as_torch_writes_it_is_known() -> None:
    card = {"vendor": "amd", "name": "x", "gfx": "gfx90a:sramecc+:xnack-"}
    assert facts_from_json({**LEAST, "gpus": [card]}, "x").gpus[0].gfx == "gfx90a"


def test_no_text_calls_hips_version_that_of_rocm() -> None:
    """HIP and ROCm have had different numbers since ROCm 10: texts about ROCm go by ``Torch.rocm_version``."""
    wrong = re.compile(r"ROCm[^\n\"']*\{[\w.]*\bhip\b")
    root = Path(lora_rocm.__file__).parents[1]
    found = [path for room in ("lora_rocm", "scripts") for path in (root / room).rglob("*")]
    sources = [path for path in found if path.suffix in (".py", ".toml")]
    assert len(sources) > 100
    assert [str(path) for path in sources if wrong.search(path.read_text(encoding="utf-8"))] == []
    assert wrong.search('f"ROCm {torch.hip}"') and wrong.search("ROCm ({torch.hip})")  # control
    assert not wrong.search('f"ROCm {torch.rocm_version}"')
