"""The exit codes of a command."""

from pathlib import Path

import pytest

from lora_rocm.errors import DataError, StorageError
from lora_rocm.foundation.exit_codes import exit_code_of
from tests.wording import Worded, says, worded


def raiser(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            DataError("c", "No images.", where="pics", fix="Add some."),
            2,
            worded("foundation/no-images-where-pics-fix-add-some"),
        ),
        (StorageError("c", "Disk full."), 3, worded("foundation/disk-full")),
        (KeyboardInterrupt(), 130, worded("foundation/stopped")),
        (PermissionError(13, "Permission denied", "/x"), 3, worded("foundation/not-permitted-here")),
        (OSError(28, "No space left", "/x"), 3, worded("foundation/the-disk-is-full")),
    ],
)
def test_errors_become_sentences(
    error: BaseException, code: int, words: Worded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(lambda: raiser(error)) == code
    told = capsys.readouterr().err
    assert says(told, words) and "Traceback" not in told


def test_success() -> None:
    assert exit_code_of(lambda: None) == 0 and exit_code_of(lambda: 130) == 130


def test_a_bug_is_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert exit_code_of(lambda: raiser(ZeroDivisionError("oops"))) == 3
    told = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert says(told, "program/this-is-a-bug")
    assert str(file) in told and "Traceback" not in told and "ZeroDivisionError: oops" in told
    assert "Traceback" in file.read_text(encoding="utf-8")


def test_memory_that_is_used_up_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def use_all() -> int:
        raise MemoryError

    assert exit_code_of(use_all) == 3
    assert says(said := capsys.readouterr().err, "foundation/main-memory-is-used-up") and "bug" not in said
