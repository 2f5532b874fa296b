"""The folder with the program's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.hardware.app_dir import app_dir


@pytest.mark.parametrize(
    ("system", "environ", "expected"),
    [
        ("linux", {"HOME": "/home/me"}, "/home/me/.cache/lora-rocm"),
        ("linux", {"HOME": "/home/me", "XDG_CACHE_HOME": "/big/cache"}, "/big/cache/lora-rocm"),
        ("macos", {"HOME": "/Users/me"}, "/Users/me/Library/Caches/lora-rocm"),
        ("windows", {"LOCALAPPDATA": "C:/Users/me/AppData/Local"}, "C:/Users/me/AppData/Local/lora-rocm"),
        ("windows", {"USERPROFILE": "C:/Users/Jürgen"}, "C:/Users/Jürgen/AppData/Local/lora-rocm"),
        ("linux", {"HOME": "/home/me", "LORA_ROCM_HOME": "/elsewhere"}, "/elsewhere"),
        ("windows", {"LORA_ROCM_HOME": "D:/a folder"}, "D:/a folder"),
    ],
)
def test_the_folder(system: str, environ: dict[str, str], expected: str) -> None:
    assert app_dir(environ, system) == Path(expected)


def test_a_user_without_home_has_a_folder_all_the_same() -> None:
    assert app_dir({}, "linux").name == "lora-rocm"
