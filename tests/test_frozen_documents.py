"""The contract with scripts, frozen in reviewed files: the documents of ``--json``, and exit codes."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_rocm import errors
from lora_rocm.commands.output import Failed
from lora_rocm.json_reference import FOLLOWS, RESULTS, inside, keys_of, type_text
from tests.command_line import command_line
from tests.golden import assert_golden
from tests.supervisor.fake_run import write_whole_run
from tests.test_cli import HEALTHY, ROOT


def document_lines() -> Iterator[str]:
    """Every command's document, and every key of every document with its type."""
    for name, kind in RESULTS.items():
        yield f"{name}: {kind.__name__}{', after lines of events' if name in FOLLOWS else ''}"
    seen: dict[type, None] = {}
    waiting: list[type] = [Failed, *RESULTS.values()]
    while waiting:
        kind = waiting.pop(0)
        if kind in seen:
            continue
        seen[kind] = None
        keys = keys_of(kind)
        waiting += [found for key in keys for found in inside(key.hint)]
    for kind in sorted(seen, key=lambda kind: kind.__name__):
        yield f"\n{kind.__name__}"
        for key in keys_of(kind):
            of = type_text(key.hint).replace("](#", " (").replace("[", "").replace(")", "").partition(" (")[0]
            yield f"  {key.name}{'?' if key.is_optional else ''}: {of}"


def test_documents_are_frozen() -> None:
    """Keys may be added; a key that is gone or has another type breaks scripts."""
    assert_golden("contract", "json-documents", "\n".join(document_lines()) + "\n")


def error_classes() -> Iterator[type[errors.LoraRocmError]]:
    found = (value for value in vars(errors).values() if isinstance(value, type))
    yield from (kind for kind in found if issubclass(kind, errors.LoraRocmError))


CALLS: dict[str, tuple[str, ...]] = {
    "a result": ("schema",),
    "help": ("train", "--help"),
    "version": ("-V",),
    "a valid recipe": ("check", "demo.yaml", "--schema-only"),
    "a healthy machine": ("doctor", "--facts", HEALTHY, "--quick"),
    "no command": (),
    "an unknown command": ("tarin",),
    "an unknown option": ("status", "--foo"),
    "no recipe given": ("train",),
    "a missing recipe": ("check", "none.yaml"),
    "a wrong value": ("check", "demo.yaml", "--schema-only", "--set", "lora.rank=x"),
    "another trainer's file": ("check", "foreign.toml", "--schema-only"),
    "no run": ("status", "nowhere"),
    "no run in the folder": ("report", "--runs-dir", "nowhere"),
    "a finished run": ("status", "run"),
    "an unusable file": ("inspect", "foreign.toml"),
    "no cache": ("cache", "stats", "--dir", "nowhere"),
    "a damaged cache": ("cache", "verify"),
}


def test_exit_codes_are_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_rocm.rundir.layout import RunDir

    monkeypatch.chdir(tmp_path)
    write_whole_run(RunDir(tmp_path / "run"))
    (tmp_path / "foreign.toml").write_text('pretrained_model_name_or_path = "x"\nnetwork_dim = 8\n', encoding="utf-8")
    (tmp_path / "cache" / "text" / "ab").mkdir(parents=True)
    (tmp_path / "cache" / "text" / "ab" / f"ab{'0' * 38}.safetensors").write_bytes(b"torn")
    lines = [f"{kind.exit_code:3} {kind.__name__}" for kind in error_classes()]
    for what, words in CALLS.items():
        given = [str(ROOT / word) if word == HEALTHY else word for word in words]
        lines.append(f"{command_line(*given).exit_code:3} {what}: {' '.join(['lora-rocm', *words])}")
    assert_golden("contract", "exit-codes", "\n".join(lines) + "\n")


def test_a_type_without_a_name_would_be_noticed() -> None:
    """Negative control: the lines have every key of a document."""
    text = "\n".join(document_lines())
    assert all(f"  {key}: " in text for key in typing.get_type_hints(Failed))
    assert "disk_bytes: whole number" in text and "exit_code: whole number" in text
