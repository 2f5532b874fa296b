"""Formats of quantised layers: nf4 is bitsandbytes' format, errors have the expected size, zeros stay zeros."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.kernels.nf4_codes import LEVELS, TINY, NearestLevels, pairs_of
from lora_rocm.kernels.quantised import Nf4, QuantisedLinears, dynamic_map, quantised
from lora_rocm.kernels.weight_format import DENSE, PackedLinear, dense_shape, dense_weight, pack
from lora_rocm.planning.format_errors import format_errors

BITSANDBYTES = json.loads(Path(__file__).with_name("nf4_of_bitsandbytes.json").read_bytes())
FORMATS = ("int8", "fp8", "nf4")


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    """64 x 512 numbers that every machine computes alike."""
    index = torch.arange(64 * 512, dtype=torch.int64)
    share = ((index * 2654435761) % 2**32).double() / 2**32 - 0.5
    return share.pow(3).mul(0.3).float().view(64, 512).to(dtype)


def linear(weight_OI: Tensor) -> nn.Linear:
    layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    return layer


def packed(name: str, weight_OI: Tensor) -> PackedLinear:
    parent = nn.Sequential(linear(weight_OI))
    pack(parent, quantised(name, ""))
    (layer,) = parent
    assert isinstance(layer, PackedLinear)
    return layer


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nf4_has_the_bytes_of_bitsandbytes(dtype: str) -> None:
    golden, weight = BITSANDBYTES[dtype], weights(getattr(torch, dtype))
    layer = packed("nf4", weight)
    assert sha256(layer.weight.data) == golden["codes_sha256"]
    assert sha256(pairs_of(weight)[1]) == golden["absmax_sha256"]
    assert sha256(packed("nf4", weight + 0.01).weight.data) != golden["codes_sha256"], "the control"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nested_magnitudes_of_bitsandbytes_are_decoded_equally(dtype: str) -> None:
    """Its nested codes are not always the nearest, so the codes themselves may differ from ours."""
    golden, layer = BITSANDBYTES[dtype], packed("nf4", weights(getattr(torch, dtype)))
    layer.nested_codes = torch.tensor(list(bytes.fromhex(golden["nested_codes"])), dtype=torch.uint8)
    layer.nested = torch.tensor(golden["nested"])
    layer.offset = torch.tensor([golden["offset"]])
    assert sha256(Nf4("").magnitudes(layer)) == golden["magnitudes_sha256"]
    if dtype == "float32":  # elsewhere the levels are rounded to the dtype before they are scaled
        assert sha256(dense_weight(layer)) == golden["dense_sha256"]


@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("fp8", 0.03), ("nf4", 0.11)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_the_error_does_not_depend_on_the_size_of_the_weights(name: str, most: float, size: float) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * size
    error = (dense_weight(packed(name, weight)) - weight).norm() / weight.norm()
    assert most / 4 < error < most
    plain = weight.to(torch.float8_e4m3fn).float()
    assert (plain - weight).norm() / weight.norm() > most or size == 1.0, "the control: a plain cast loses small ones"


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_that_which_plan_names(name: str) -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = (dense_weight(packed(name, weight)) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(format_errors()[name].weights, rel=0.05)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_single_rows(name: str) -> None:
    weight = torch.zeros(8, 128)
    weight[3, 5] = -2.0
    found = dense_weight(packed(name, weight))
    assert found.shape == weight.shape and torch.isfinite(found).all()
    assert found[3, 5] == pytest.approx(-2.0, rel=1e-3) and found.count_nonzero() == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dense_weight_has_the_wanted_dtype(name: str, dtype: torch.dtype) -> None:
    """Also if it is not the packed layer's dtype; the values differ by the rounding of the two dtypes only."""
    for stored in (torch.bfloat16, torch.float32):
        layer = packed(name, weights(stored))
        found = dense_weight(layer, dtype)
        assert found.dtype == dtype and tuple(found.shape) == dense_shape(layer) == (64, 512)
        exact = dense_weight(packed(name, weights(stored).float()))
        torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_do_not_depend_on_the_machine_or_the_start(name: str) -> None:
    first, second = (packed(name, weights(torch.bfloat16)) for _ in range(2))
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    """A mean of 65,536 float32 numbers does."""
    weight = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(packed("nf4", weight).state_dict())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(tensor, other[key]) for other in found[1:] for key, tensor in found[0].items())


def test_only_matching_frozen_linear_layers_are_packed() -> None:
    model = nn.ModuleDict(
        {
            "block": nn.ModuleDict({"a": linear(weights()), "odd": nn.Linear(63, 5), "conv": nn.Conv2d(4, 4, 1)}),
            "trained": nn.ModuleDict({"block": nn.Linear(64, 64)}),
            "head": linear(weights()),
        }
    ).requires_grad_(False)
    model["trained"].requires_grad_(True)
    nf4 = quantised("nf4", r"block")
    expected = nf4.num_bytes(model, torch.float32)
    pack(model, nf4)
    assert [path for path, layer in model.named_modules() if isinstance(layer, PackedLinear)] == ["block.a"]
    stored = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert stored - expected == 64 * 64 * 4 - 64 * 32 - 256 - 4 * 2 - 256 * 12, "a trained layer is dense"
    assert quantised("none", "") is DENSE and isinstance(nf4, QuantisedLinears)


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packed(name, weights())
    monkeypatch.setattr("lora_rocm.kernels.nf4_codes.PIECE", 1000)  # rows and blocks that do not divide evenly
    in_pieces = packed(name, weights())
    for (key, tensor), (_, other) in zip(whole.state_dict().items(), in_pieces.state_dict().items(), strict=True):
        assert torch.equal(tensor, other), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_the_same_on_a_gpu(name: str) -> None:
    torch.manual_seed(2)
    layer = nn.Linear(640, 1280, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    found = quantised(name, "").packed(copy.deepcopy(layer).cuda()).state_dict()
    for key, tensor in quantised(name, "").packed(layer).state_dict().items():
        assert torch.equal(found[key].cpu(), tensor), key


@pytest.mark.parametrize("levels", [LEVELS, dynamic_map()], ids=["nf4", "dynamic map"])
def test_the_nearest_level_is_that_of_a_search(levels: tuple[float, ...]) -> None:
    levels_L = torch.tensor(levels)
    limits = (levels_L[:-1] + levels_L[1:]) / 2
    ends = torch.tensor([-1.0, -0.0, 0.0, 1.0, -1e-45, 1e-45, 1e-38, -torch.inf, torch.inf])
    beside = [torch.nextafter(limits, torch.full_like(limits, towards)) for towards in (-2.0, 2.0)]
    drawn = torch.rand(100_000, generator=torch.Generator().manual_seed(4)) * 2 - 1
    numbers = torch.cat([limits, *beside, levels_L, ends, drawn, drawn * 1e-4])
    nearest = NearestLevels(levels, len(numbers), numbers.device)
    assert torch.equal(nearest(numbers).int(), torch.bucketize(numbers, limits, out_int32=True))
    assert not torch.equal(nearest(beside[0]).clone(), nearest(beside[1])), "the control"


def test_codes_of_bf16_from_the_table_are_those_of_a_division() -> None:
    """Blocks of all sizes: random bits, blocks of zeros, numbers below ``TINY``, and single large numbers."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 15), 1 << 15, (256, 64), generator=generator).to(torch.int16).view(torch.bfloat16)
    normal = (
        torch.randn(9 * 64, 64, generator=generator) * 10.0 ** torch.arange(-40, 32, 8).repeat_interleave(64)[:, None]
    )
    normal[::7, 3] *= 1000
    small = torch.randn(64, 64, generator=generator) * TINY / 3
    blocks = torch.cat(
        [bits.where(bits.isfinite(), 0), normal.bfloat16(), small.bfloat16(), torch.zeros(2, 64).bfloat16()]
    )
    pairs, absmax = pairs_of(blocks)
    divided = blocks.float() / absmax.clamp(min=TINY)[:, None]
    limits = (torch.tensor(LEVELS)[:-1] + torch.tensor(LEVELS)[1:]) / 2
    codes = torch.bucketize(divided, limits).view(-1, 2)
    assert torch.equal(pairs.long(), codes[:, 0] << 4 | codes[:, 1])
    assert torch.equal(absmax, blocks.float().abs().amax(1)) and (absmax < TINY).any() and (absmax > 1e20).any()
    assert torch.equal(pairs, pairs_of(blocks.float())[0]), "the same weights in float32 take no table"


def test_the_levels_are_quantiles_of_the_normal_distribution() -> None:
    """arXiv 2305.14314: equally many values fall to each level; the outermost ones take the tails."""
    pairs, _ = pairs_of(torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)))
    index = torch.cat([pairs >> 4, pairs & 15])
    shares = torch.bincount(index.long(), minlength=16) / index.numel()
    assert len(LEVELS) == 16 and (shares[1:-1] > 0.02).all() and (shares < 0.12).all()


def test_a_graph_of_packed_products_is_that_of_dense_ones() -> None:
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(2), requires_grad=True)
    for name in FORMATS:
        layer: Any = packed(name, weights())
        (found,) = torch.autograd.grad(layer(x).square().sum(), x)
        dense = dense_weight(layer)
        (expected,) = torch.autograd.grad((x @ dense.t()).square().sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
