"""Every error describes its fix: a check of all places in the source that raise one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lora_rocm
from lora_rocm import errors
from tests.source_nodes import every_node

ROOT = Path(lora_rocm.__file__).parent
NOT_WRONG = {"StoppedError"}
"""The user asked for it, so there is nothing to fix."""
OF_PROBLEMS = {"RecipeError"}
"""Each of its problems has its own remedy."""
FOR_ANY_RUN = {
    "supervisor/multi_gpu.py": 1,  # the start by torchrun needs --resume
    "supervisor/choose_run_dir.py": 1,  # there is a run here
    "supervisor/worker_process.py": 1,  # after a restart of the machine
    "train/resume.py": 1,  # there is a checkpoint, and it is damaged
}
"""Errors with advice that names --resume latest whether or not the run has a checkpoint."""
NEEDS_FIX = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.LoraRocmError)
} - (NOT_WRONG | OF_PROBLEMS)


def without_fix(source: str) -> Iterator[int]:
    """Lines that make an error without a remedy, or with an empty one."""
    for node in every_node(ast.parse(source)) if any(name in source for name in NEEDS_FIX) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NEEDS_FIX:
            given = [keyword.value for keyword in node.keywords if keyword.arg in ("fix", None)]
            if not given or (isinstance(given[0], ast.Constant) and not given[0].value):
                yield node.lineno


def test_every_error_has_a_remedy() -> None:
    assert len(NEEDS_FIX) > 15
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted(ROOT.rglob("*.py"))
        if (lines := list(without_fix(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise AdapterError('c', what, where=str(path))", 1),
        ("UserError('c', what, fix='')", 1),
        ("UserError('c', what, fix='Do this.')", 0),
        ("UserError('c', what, **more)", 0),
        ("StoppedError('killed', what)", 0),
    ],
)
def test_an_error_without_a_remedy_is_found(source: str, count: int) -> None:
    assert len(list(without_fix(source))) == count


def resuming_unasked(source: str) -> Iterator[int]:
    """Lines with advice that names --resume latest and does not come from ``errors.resume_advice``."""
    for node in every_node(ast.parse(source)) if "--resume" in source else ():
        if isinstance(node, ast.keyword) and node.arg == "fix":
            texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            if any(isinstance(text, str) and "--resume" in text for text in texts):
                yield node.value.lineno


def test_advice_to_resume_has_another_form_without_a_checkpoint() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}
    found = {name: count for name, source in sources.items() if (count := len(list(resuming_unasked(source))))}
    assert found == FOR_ANY_RUN
    assert list(resuming_unasked("E('c', w, fix=f'Do {x} ' 'with --resume latest.')")) == [1], "the control"
    assert list(resuming_unasked("E('c', w, **resume_advice('Do so with --resume latest.'))")) == []


def test_the_advice_for_a_run_without_a_checkpoint() -> None:
    advice = errors.resume_advice("Run it with --resume latest; or stop.")
    assert "--resume" not in advice["fix_without_checkpoint"] and advice["fix_without_checkpoint"].startswith(
        "Run it; or stop. "
    )
    assert errors.resume_advice("Use --resume latest.", without_checkpoint="Begin.")[
        "fix_without_checkpoint"
    ].startswith("Begin. ")
    with pytest.raises(AssertionError):
        errors.resume_advice("Run it again.")
