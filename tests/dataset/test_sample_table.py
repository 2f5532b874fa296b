"""A sample table returns the samples that were written to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset import sample_table
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.dataset.sample_table import Companion, Sample, Samples
from lora_rocm.recipe.schema import DataSection

any_text = st.text(st.characters(codec=None), max_size=12)  # also halves of letters, as names of files may have
names = any_text.filter(lambda text: text not in ("", ".") and "/" not in text and "\0" not in text)
SOURCES = DataSection(sources=({"path": "/a"}, {"dataset": "b", "split": "c", "image_column": "d"})).resolved_sources()


def sample(text: str, name: str, size: int, of_dataset: bool) -> Sample:
    location = DatasetRow("b", "c", "d", size) if of_dataset else Path("/a", name)
    place = DatasetRow("b", "c", text or "e", size) if of_dataset and size % 2 else Path("/b", name)
    companions = tuple(Companion(each, place, size, 7) for each in ("mask", "control_2")[: size % 3])
    how = {"companions": companions}
    location = Path("/c", name) if of_dataset and size % 5 == 0 else location  # a file that the row names
    return Sample(name, int(of_dataset), text, location, text[::-1], size, size + 1, 3, SOURCES[of_dataset], **how)


@given(st.lists(st.builds(sample, any_text, names, st.integers(1, 10**6), st.booleans()), max_size=9))
def test_samples(samples: list[Sample]) -> None:
    made = Samples(SOURCES)
    for number, each in enumerate(samples):
        made.append(each)
        assert len(made) == number + 1
    assert list(made) == samples and made[2:5] == samples[2:5]
    assert all(made[-1 - at] == samples[-1 - at] for at in range(len(samples)))
    assert list(Samples(SOURCES, made.batch)) == samples


def test_more_are_appended_after_some_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_table, "ROWS_AT_ONCE", 3)
    samples = [sample("x", f"{number}.png", number + 1, False) for number in range(8)]
    made = Samples(SOURCES)
    for number, each in enumerate(samples):
        made.append(each)
        assert made[number] == each
    assert list(made) == samples and list(made.at([5, 0])) == [samples[5], samples[0]]


def test_the_files_that_datasets_name(tmp_path: Path, make: SimpleNamespace) -> None:
    made, named = Samples(SOURCES), Path("/elsewhere/0.png")
    places = (named, Path("/elsewhere/1.png"), DatasetRow("b", "c", "e", 3))
    companions = tuple(Companion(f"control {number}", place, 8, 8) for number, place in enumerate(places))
    listed = Sample("k", 1, "", named, "", 8, 8, 1, SOURCES[1], companions=companions)
    for each in (sample("x", "0.png", 8, False), sample("x", "1.png", 9, True), listed):
        made.append(each)
    assert list(made.files_of_datasets()) == [str(named), "/elsewhere/1.png"]
    assert made[2] == listed
    assert not list(Samples(SOURCES[:1], made.at([0]).batch).files_of_datasets())
