"""The settings travel in one variable, and a damaged one is reported in words."""

from __future__ import annotations

import json

import pytest

from lora_rocm.errors import MachineError
from lora_rocm.hardware.settings import VARIABLE, Settings, settings_from

ALL = Settings(
    miopen=False,
    attention="math",
    pin_memory=False,
    precision="fp16",
    heap_copy=True,
    memory_limit_bytes=2**33,
    kept_free_bytes=2**29,
    library_bytes=2**30,
    loader_workers=0,
    copy_method="clone",
    micro_batch_parts=4,
    checkpointing=True,
    image_tiling=True,
    preview_tiling=True,
)


@pytest.mark.parametrize("settings", [Settings(), ALL, Settings(precision="no")])
def test_there_and_back(settings: Settings) -> None:
    assert settings_from({VARIABLE: settings.to_text()}) == settings


def test_without_a_parent_the_defaults_hold() -> None:
    assert settings_from({}) == settings_from({VARIABLE: ""}) == Settings()


def test_only_what_differs_is_written() -> None:
    assert Settings().to_text() == "{}"
    assert json.loads(Settings(miopen=False).to_text()) == {"miopen": False}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ("null", "JSON object"),
        ('{"colour": 1}', "no setting 'colour'"),
        ('{"miopen": "no"}', "miopen cannot be 'no'"),
        ('{"miopen": 0}', "miopen cannot be 0"),
        ('{"attention": "slow"}', "attention cannot be 'slow'"),
        ('{"precision": "fp8"}', "precision cannot be 'fp8'"),
        ('{"precision": []}', "precision cannot be []"),
        ('{"copy_method": "pinned"}', "copy_method cannot be 'pinned'"),
        ('{"micro_batch_parts": "2"}', "micro_batch_parts cannot be '2'"),
        ('{"memory_limit_bytes": true}', "memory_limit_bytes cannot be True"),
        ('{"memory_limit_bytes": 1.5}', "memory_limit_bytes cannot be 1.5"),
    ],
)
def test_a_damaged_variable_is_told_in_words(text: str, words: str) -> None:
    with pytest.raises(MachineError) as caught:
        settings_from({VARIABLE: text})
    assert caught.value.code == "settings-damaged" and words in caught.value.what
    assert VARIABLE in caught.value.fix and text in caught.value.where
