"""How a command ends."""

from pathlib import Path

import pytest

from lora_rocm.errors import DataError, StorageError
from lora_rocm.foundation.exit_codes import exit_code_of


def raiser(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            DataError("c", "No images.", where="pics", fix="Add some."),
            2,
            "No images.\n  where: pics\n  fix:   Add some.",
        ),
        (StorageError("c", "Disk full."), 3, "Disk full."),
        (KeyboardInterrupt(), 130, "Stopped."),
        (PermissionError(13, "Permission denied", "/x"), 3, "not permitted here"),
        (OSError(28, "No space left", "/x"), 3, "The disk is full"),
    ],
)
def test_errors_become_sentences(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(lambda: raiser(error)) == code
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


def test_success() -> None:
    assert exit_code_of(lambda: None) == 0 and exit_code_of(lambda: 130) == 130


def test_a_bug_is_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert exit_code_of(lambda: raiser(ZeroDivisionError("oops"))) == 3
    told = capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    assert str(file) in told and "Traceback" not in told and "ZeroDivisionError: oops" in told
    assert "Traceback" in file.read_text(encoding="utf-8")


def test_memory_that_is_used_up_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def use_all() -> int:
        raise MemoryError

    assert exit_code_of(use_all) == 3
    assert "main memory is used up" in (said := capsys.readouterr().err) and "bug" not in said
