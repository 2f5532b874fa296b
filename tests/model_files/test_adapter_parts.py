"""Every tensor of a LoRA file is taken, named as harmless, or the reason to refuse the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.errors import AdapterError
from lora_rocm.model_files.adapter_parts import grouped, kind_named, others
from tests.wording import says

LORA = kind_named("LoRA")
DORA = "a weight decomposition (DoRA)"
FILE = Path("some lora.safetensors")
KEY = "lora_unet_middle_block_1_proj_in"
EXAMPLES = {  # ending -> words that name it
    "hada_w1_a": "LoHa", "hada_t2": "LoHa", "lokr_w1": "LoKr", "lokr_w2_b": "LoKr", "oft_blocks": "OFT",
    "lokr_t2": "Tucker-decomposed LoKr",
    "oft_R.weight": "OFT", "boft_R": "BOFT", "rescale": "OFT", "lora_mid.weight": "Tucker", "a1.weight": "GLoRA",
    "b2.weight": "GLoRA", "bm.weight": "GLoRA", "on_input": "IA3", "weight": "IA3", "w_norm": "train_norm",
    "b_norm": "train_norm", "diff": "in full", "diff_b": "in full", "set_weight": "replace",
    "reshape_weight": "replace", "scalar": "use_scalar", "lora_embedding_A": "embeddings",
    "bias": "biases", "lora_up.bias": "biases", "lora_B.bias": "biases", "scale_weight": "scaled",
}  # fmt: skip


def lora(key: str = KEY) -> dict[str, torch.Tensor]:
    return {f"{key}.lora_down.weight": torch.ones(2, 32), f"{key}.lora_up.weight": torch.ones(32, 2)}


def read(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    said: list[str] = []
    return grouped(tensors, FILE, LORA, said.append), said


def refused(tensors: dict[str, torch.Tensor]) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        read(tensors)
    assert caught.value.where == str(FILE) and caught.value.fix
    return caught.value


def test_a_plain_lora_is_taken_whole_and_nothing_is_said() -> None:
    tensors = lora() | {f"{KEY}.alpha": torch.tensor(1.0), f"{KEY}.dora_scale": torch.ones(32, 1)}
    groups, said = read(tensors)
    assert groups[KEY].keys() == {"down", "up", "alpha", "dora_scale"} and said == []


@pytest.mark.parametrize("ending", EXAMPLES)
def test_other_parts_are_named_alone_and_beside_a_lora(ending: str) -> None:
    other = {f"lora_unet_input_blocks_1_0_in_layers_0.{ending}": torch.zeros(1)}
    alone, beside = refused(other), refused(lora() | other)
    assert (alone.code, beside.code) == ("lora-kind", "lora-parts")
    for error in (alone, beside):
        assert EXAMPLES[ending] in error.what and ending in error.what


def test_every_row_of_the_table_has_an_example() -> None:
    said = [refused({f"lora_x.{ending}": torch.zeros(1)}).what for ending in EXAMPLES]
    of_others = [row for row in others().refused if row.what != DORA]
    assert all(any(row.what in text for text in said) for row in of_others)
    assert len(of_others) == len(others().refused) - 1, "a LoRA takes a weight decomposition; other kinds refuse it"


def test_what_no_table_knows_is_refused_by_its_name() -> None:
    error = refused(lora() | {f"{KEY}.gate.weight": torch.zeros(1)})
    assert error.code == "lora-parts" and f"{KEY}.gate.weight" in error.what


def test_a_base_model_is_no_lora_even_though_it_has_biases() -> None:
    block = "first_stage_model.decoder.conv_in"
    assert refused({f"{block}.bias": torch.zeros(1), f"{block}.weight": torch.zeros(1)}).code == "lora-empty"


def test_embeddings_that_are_bundled_are_named_and_the_lora_is_taken() -> None:
    groups, said = read(lora() | {"bundle_emb.zibu.clip_l": torch.zeros(1), "bundle_emb.zibu.clip_g": torch.zeros(1)})
    assert groups.keys() == {KEY}
    assert len(said) == 1 and says(said[0], "model_files/2-tensors-such-as-bundle-emb-zibu") and FILE.name in said[0]


@pytest.mark.parametrize("missing", ["down", "up"])
def test_half_of_a_module_is_refused(missing: str) -> None:
    other = lora("lora_unet_x")
    del other[f"lora_unet_x.lora_{missing}.weight"]
    error = refused(lora() | other)
    assert error.code == "lora-incomplete" and "lora_unet_x" in error.what and missing in error.what
    assert refused(lora() | {"lora_unet_x.dora_scale": torch.ones(1)}).code == "lora-incomplete"


def test_an_alpha_alone_does_nothing_and_is_named() -> None:
    groups, said = read(lora() | {"lora_unet_x.alpha": torch.ones(())})
    assert groups.keys() == {KEY} and "lora_unet_x" in said[0]


def test_the_same_part_twice_is_refused() -> None:
    error = refused(lora() | {f"{KEY}.lora_A.weight": torch.zeros(2, 32)})
    assert f"{KEY}.lora_A.weight" in error.what


WORDS = st.sampled_from([*LORA.roles, *EXAMPLES, "gate", "x.y", "bundle_emb.a.clip_l", ""])
NAMES = st.builds(lambda module, word: f"{module}.{word}".strip("."), st.sampled_from([KEY, "unet.x", "a"]), WORDS)


@given(st.sets(NAMES | st.sampled_from(["bundle_emb.a.clip_l", "alone"]), min_size=1, max_size=6), st.booleans())
def test_no_tensor_is_ever_left_out_in_silence(names: set[str], with_lora: bool) -> None:
    """Taken, or named in a notice, or the file is refused: there is no fourth."""
    tensors = {name: torch.zeros(1) for name in names} | (lora() if with_lora else {})
    try:
        groups, said = read(tensors)
    except AdapterError as error:
        assert error.what and error.fix
        return
    taken = {id(tensor) for parts in groups.values() for tensor in parts.values()}
    left = {name for name, tensor in tensors.items() if id(tensor) not in taken}
    lone_alphas = {name for name in left if name.endswith(".alpha")}
    assert all(name.startswith("bundle_emb.") for name in left - lone_alphas)
    assert len(said) == bool(lone_alphas) + bool(left - lone_alphas)
    assert len(others().noticed) == 1
