"""Rows of modules and of keys: weights that are one in a file and several here, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lora_rocm.adapters.kinds.lokr import LokrEntry
from lora_rocm.adapters.kinds.lora_entry import LoraEntry
from lora_rocm.adapters.lora_files.key_table import KeyTable, adaptable, canonical
from tests.wording import Worded, saying, worded

HEADS = {"to_q": (0, 6), "to_k": (6, 4), "to_v": (10, 4)}
WIDTH = 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (_, rows) in HEADS.items():
            setattr(self, name, nn.Linear(WIDTH, rows))
        self.gate_up = nn.Linear(WIDTH, 8)


def rows_in_file(component: str, module: str, rows: int) -> Sequence[tuple[str, int, int]]:
    """Query, key and value are one ``qkv``; ``gate_up`` is two weights, stored in the opposite order."""
    if module in HEADS:
        return [("k_qkv", HEADS[module][0], rows)]
    return [("k_up", 0, rows // 2), ("k_gate", 0, rows // 2)]


def table() -> KeyTable:
    return KeyTable({"transformer": Attention()}, rows_in_file)


def lora(rows: int, rank: int, rng: torch.Generator, scale: float = 0.5, dora: bool = False) -> LoraEntry:
    down, up = torch.randn(rank, WIDTH, generator=rng), torch.randn(rows, rank, generator=rng)
    return LoraEntry(down, up, scale, torch.rand(rows, generator=rng) + 1 if dora else None)


def loras(dora: bool = False, **scales: float) -> dict[str, LoraEntry]:
    rng = torch.Generator().manual_seed(1)
    return {
        f"transformer.{name}": lora(rows, 2 + number, rng, scales.get(name, 0.5), dora)
        for number, (name, (_, rows)) in enumerate([*HEADS.items(), ("gate_up", (0, 8))])
    }


def test_shapes_of_keys_are_those_of_all_their_modules() -> None:
    found = table()
    assert found.shapes == {"k_qkv": (14, WIDTH), "k_up": (4, WIDTH), "k_gate": (4, WIDTH)}
    assert found.whole("k_qkv") is None and found.whole("k_up") is None


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("scales", [{}, {"to_k": 2.0}])
def test_several_modules_are_written_as_one_weight_and_read_back(dora: bool, scales: dict[str, float]) -> None:
    entries, weights = loras(dora, **scales), {"k_qkv": torch.randn(14, WIDTH), "k_gate": torch.randn(4, WIDTH)}
    keys = table().of_keys(entries)
    assert keys.keys() == {"k_qkv", "k_up", "k_gate"}
    parts = [entries[f"transformer.{name}"].effect(weights["k_qkv"][at : at + n]) for name, (at, n) in HEADS.items()]
    torch.testing.assert_close(keys["k_qkv"].effect(weights["k_qkv"]), torch.cat(parts))
    assert keys["k_qkv"].rank == 2 + 3 + 4
    back = table().of_modules(keys)
    assert back.keys() == entries.keys()
    for name, entry in entries.items():
        torch.testing.assert_close(back[name].update(), entry.update())
        assert back[name].rank == entry.rank, "the ranks of the others are left out"


def test_one_module_is_written_as_several_weights() -> None:
    entries = loras()
    keys, whole = table().of_keys(entries), entries["transformer.gate_up"].update()
    torch.testing.assert_close(keys["k_up"].update(), whole[:4])
    torch.testing.assert_close(keys["k_gate"].update(), whole[4:])
    assert keys["k_up"].rank == entries["transformer.gate_up"].rank
    back = table().of_modules({"k_up": keys["k_up"]})["transformer.gate_up"]  # a file with one of the two
    torch.testing.assert_close(back.update()[:4], whole[:4])
    assert not back.update()[4:].any()


def test_modules_that_are_not_adapted_stay_zero_rows() -> None:
    entries = loras()
    del entries["transformer.to_k"]
    update = table().of_keys(entries)["k_qkv"].update()
    assert not update[6:10].any() and update[:6].any() and update[10:].any()
    assert table().of_modules(table().of_keys(entries)).keys() == entries.keys()


def test_what_was_cut_from_one_is_joined_to_the_same_again() -> None:
    one = lora(14, 3, torch.Generator().manual_seed(2))
    again = table().of_keys(table().of_modules({"k_qkv": one}))["k_qkv"]
    assert again.rank == 3
    torch.testing.assert_close(again.update(), one.update())


def test_a_dora_of_some_of_the_modules_cannot_be_written_as_one() -> None:
    entries = loras(dora=True)
    del entries["transformer.to_k"]
    with pytest.raises(ValueError, check=saying("adapters/dora-of-some")):
        table().of_keys(entries)


def lokr(rows: int, outer: int) -> LokrEntry:
    w1, w2 = torch.randn(outer, 1), torch.randn(rows // outer, WIDTH)
    return LokrEntry((w1,), (w2,), 1.0, (rows, WIDTH))


def test_a_lokr_of_several_modules_is_cut_between_its_blocks_or_not_at_all() -> None:
    entry = lokr(14, 7)  # blocks of two rows
    back = table().of_modules({"k_qkv": entry})
    torch.testing.assert_close(torch.cat([back[f"transformer.{name}"].update() for name in HEADS]), entry.update())
    with pytest.raises(ValueError, check=saying("adapters/between-its-blocks")):
        table().of_modules({"k_qkv": lokr(14, 2)})
    with pytest.raises(ValueError, check=saying("adapters/cannot-be-written-as-one")):
        table().of_keys({f"transformer.{name}": lokr(rows, 2) for name, (_, rows) in HEADS.items()})


@pytest.mark.parametrize(("rows", "words"), [
    (lambda component, module, count: [("one", 0, count)], worded("adapters/that-another-module-has")),
    (lambda component, module, count: [(module, 0, count - 1)], worded("adapters/its-keys-name")),
])  # fmt: skip
def test_a_family_that_miscounts_is_refused(rows: Any, words: Worded) -> None:
    with pytest.raises(ValueError, check=saying(words)):
        KeyTable({"transformer": Attention()}, rows)


def test_names_do_not_depend_on_the_level_of_text_encoders() -> None:
    assert canonical("text_encoder", "text_model.encoder.fc1") == canonical("text_encoder", "encoder.fc1")
    assert [path for path, _ in adaptable(Attention())] == [*HEADS, "gate_up"]
