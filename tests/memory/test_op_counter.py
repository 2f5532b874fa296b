"""The ledger: bytes as they come and go, the most since a mark, and work by kind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from lora_rocm.device.allocator import PIECE_BYTES, taken_bytes
from lora_rocm.kernels.backend import Implementation, note_shared, shared_noted
from lora_rocm.kernels.token_loss import to_loss_gradient
from lora_rocm.memory import op_counter
from lora_rocm.memory.op_counter import Ledger, fused_attention

META = torch.device("meta")


@pytest.mark.parametrize("device", [META, torch.device("cpu")])
def test_bytes_come_and_go(device: torch.device) -> None:
    weight = torch.ones(256, 256, device=device)
    with Ledger(iter([weight])) as ledger:
        a = weight + 1
        b = a.t()  # a view takes nothing
        assert ledger.live_bytes == 256 * 256 * 4
        c = a @ b
        del a
        assert ledger.live_bytes == 2 * 256 * 256 * 4  # the view still keeps it alive
        del b, c
        assert ledger.live_bytes == 0
        assert ledger.mark() == 2 * 256 * 256 * 4
        small = torch.ones(3, device=device)
        assert ledger.live_bytes == ledger.peak_bytes == PIECE_BYTES
        assert ledger.size_of(small) == PIECE_BYTES
        assert ledger.size_of(weight) == 0
    assert ledger.tally.flops == 2 * 256**3


@pytest.mark.parametrize(
    ("mib", "taken_mib"),
    [(0.5, 0.5), (9.375, 9.375), (10, 10), (12.5, 12.5), (21.09375, 22), (25, 26), (28.125, 28.125), (30, 30)],
)
def test_a_rest_that_is_too_small_for_others_is_the_tensor_s(mib: float, taken_mib: float) -> None:
    """12.5 MiB come in 14, and others get 1.5 of these; 25 come in 26, and the last one stays unused."""
    assert taken_bytes(int(mib * 2**20)) == int(taken_mib * 2**20)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [9.375, 12.5, 21.09375, 25, 28.125])
def test_a_gpu_s_allocator_counts_so(mib: float) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == taken_bytes(tensor.numel())


def test_a_product_into_memory_that_is_there_counts_as_the_other() -> None:
    left, right, out = (torch.ones(16, 16, device=META) for _ in range(3))
    with Ledger(iter([left, right, out])) as ledger:
        out.addmm_(left, right)
        torch.mm(left, right, out=out)
    assert ledger.tally.flops == 2 * 2 * 16**3
    assert ledger.tally.moved_bytes == 0


def test_what_is_no_product_counts_by_the_bytes_it_moves() -> None:
    x = torch.ones(1000, device=META)
    with Ledger(iter([x])) as ledger:
        x.add_(1)
        y = x * x
        y.view(10, 100)
    assert ledger.tally.launches == 2
    assert ledger.tally.moved_bytes == 4000 * 2 + 4000 * 3


@pytest.mark.parametrize(("fused", "squares"), [(True, 0), (False, 2)])
def test_fused_attention_keeps_no_scores(fused: bool, squares: int) -> None:
    """Plain attention makes a number for each pair of tokens; the fused one only what is as long as the input."""
    tokens, width = 512, 16
    query = torch.ones(1, 2, tokens, width, device=META, requires_grad=True)
    with fused_attention(fused), Ledger(iter([query])) as ledger:
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    scores = 2 * tokens * tokens * 4
    assert ledger.peak_bytes >= squares * scores
    assert fused == (ledger.peak_bytes < scores)
    assert ledger.tally.flops + ledger.tally.attention_flops >= 3 * 2 * 2 * 2 * tokens * tokens * width


@pytest.mark.parametrize("device", [META, torch.device("cpu")])
@pytest.mark.parametrize(("masked", "biases"), [(False, 0), (True, 3)])  # False: the control
def test_each_call_of_fused_attention_keeps_its_mask_as_a_bias(masked: bool, biases: int, device: torch.device) -> None:
    """Counted as on a real device, where three layers with one boolean mask keep three biases."""
    tokens, layers = 512, 3
    query = torch.ones(1, 2, tokens, 16, device=device, requires_grad=True)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    with fused_attention(device == META), Ledger(iter([query, mask])) as ledger:
        kept = query
        for _ in range(layers):
            kept = torch.nn.functional.scaled_dot_product_attention(
                kept, query, query, mask if masked else None, is_causal=not masked
            )
        bias_bytes = tokens * tokens * query.element_size()
        assert biases * bias_bytes <= ledger.live_bytes < (biases + 0.5) * bias_bytes
    assert kept.requires_grad
    assert (ledger.tally.attention_flops > 0) is (device == META), "the CPU's operator has no formula"


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_called_by_keyword_is_counted_as_by_position(heads: int) -> None:
    """Some model libraries call by keyword, and language models have fewer key heads than query heads."""
    query = torch.ones(1, 4, 32, 64, dtype=torch.bfloat16, device=META)
    key = torch.ones(1, heads, 32, 64, dtype=torch.bfloat16, device=META)
    attend = torch.nn.functional.scaled_dot_product_attention
    with fused_attention(), Ledger(iter([query, key])) as by_keyword:
        found = attend(query=query, key=key, value=key, attn_mask=None, is_causal=True, enable_gqa=heads < 4)
    full = key.repeat_interleave(4 // heads, dim=1)
    with fused_attention(), Ledger(iter([query, full])) as by_position:
        wanted = attend(query, full, full)
    assert found.shape == wanted.shape == query.shape
    assert by_keyword.tally.attention_flops == by_position.tally.attention_flops > 0


def test_an_operation_on_the_same_shapes_again_counts_as_the_first_time() -> None:
    """Also for an operation with a result that is the memory of its input, which its schema does not show."""
    tensor_MN = torch.ones(64, 128, device=META)
    operations = [
        lambda: torch.ops.aten._unsafe_view(tensor_MN, [128, 64]),
        lambda: tensor_MN.t() + 1,
        lambda: tensor_MN.to(torch.bfloat16),
        lambda: torch.where(tensor_MN > 0, 1.0, tensor_MN[:, :1]),
        lambda: tensor_MN @ tensor_MN.t(),
    ]
    for operation in operations:
        with Ledger(iter([tensor_MN])) as ledger:
            first, first_bytes, work = operation(), ledger.live_bytes, ledger.tally.now()
            again = operation()
        assert (first.shape, first.stride(), first.dtype) == (again.shape, again.stride(), again.dtype)
        assert ledger.live_bytes == 2 * first_bytes and ledger.tally.minus(work) == work


def test_packed_samples_of_other_lengths_are_counted_each_time() -> None:
    """The work of attention depends on the offsets of samples, which may be numbers and not only shapes."""
    packed_NHD, flops = torch.ones(8, 2, 8, dtype=torch.bfloat16, device=META), list[float]()
    for device in (torch.device("cpu"), META):
        with Ledger(iter([packed_NHD])) as ledger:
            for begin in (4, 1):
                offsets = torch.tensor([0, begin, 8], dtype=torch.int32).to(device)
                before = ledger.tally.attention_flops
                packed = torch.ops.aten._flash_attention_forward
                packed(packed_NHD, packed_NHD, packed_NHD, offsets, offsets, 8, 8, 0.0, False, False)
                flops.append(ledger.tally.attention_flops - before)
    of_halves, of_others, *at_most = flops
    assert of_others / of_halves == (1 + 7**2) / (4**2 + 4**2) and at_most[0] == at_most[1] > of_others


def test_numbers_on_the_processor_are_computed_each_time() -> None:
    with Ledger(iter([])):
        assert [(torch.full((2,), float(n)) + 1)[0].item() for n in range(3)] == [1, 2, 3]


def some_operations(weight: Tensor) -> list[object]:
    """Run operations of every kind twice, and return what they leave."""
    found: list[object] = []
    for _ in range(2):
        hidden = torch.nn.functional.layer_norm(weight, weight.shape[-1:])
        normal, mean, _ = torch.native_layer_norm(weight, weight.shape[-1:], None, None, 1e-5)
        hidden.addmm_(normal, weight.T).mul_(2)
        rows = hidden.view(2, -1)
        turned = hidden.clone().t_().unsqueeze_(0)
        grown = torch.empty(4, device=META).resize_(9)
        longest, places = torch.max(weight, dim=1)
        left, right = hidden.chunk(2)
        first = (rows, mean, turned, grown, longest, places, left, right, torch.add(left, right, out=left.clone()))
        found += [(each.shape, each.stride(), each.dtype) for each in first]
        found += [turned._version, hidden._version, rows.untyped_storage()._cdata == hidden.untyped_storage()._cdata]
    return found


def test_reused_results_are_those_of_pytorch_s_shape_rules() -> None:
    weight, seen = torch.ones(8, 8, device=META), list[object]()
    for kind in (op_counter._kind_of, lambda func: None):
        with mock.patch.object(op_counter, "_kind_of", kind), Ledger(iter([weight])) as ledger:
            found = some_operations(weight)
        seen.append((found, ledger.tally.now(), ledger.mark(), ledger.live_bytes))
        reuses = bool(ledger._made and ledger._written)
        assert reuses == (len(seen) == 1), "the control reuses nothing"
    assert seen[0] == seen[1]


def test_what_samples_share_is_known_in_the_peak() -> None:
    ledger = Ledger(iter([]))
    make = lambda mib: torch.empty(mib * 2**20, dtype=torch.uint8, device="meta")  # noqa: E731
    with shared_noted(ledger.note_shared), ledger:
        own, shared = make(1), note_shared(make(4))
        assert (ledger.peak_bytes, ledger.shared_peak_bytes) == (5 * 2**20, 4 * 2**20)
        del shared
        later = make(2)
        assert ledger.shared_peak_bytes == 2 * 2**20, "three of the samples' own at the most"
        assert ledger.mark() == 5 * 2**20 and ledger.shared_peak_bytes == 0
        del own, later
    note_shared(make(1))
    assert (ledger.live_bytes, ledger.shared_peak_bytes) == (0, 0), "outside it is not counted"


@pytest.mark.parametrize(("implementation", "least", "most"), [("triton", 0, 4096), ("eager", 2**20, 2**24)])
def test_logits_that_a_kernel_overwrites_are_not_copied(implementation: Implementation, least: int, most: int) -> None:
    logits_NV, labels_N = (torch.zeros(64, width, device="meta") for width in (2**13, 1))
    ledger = Ledger(iter([logits_NV, labels_N]))
    with ledger:
        to_loss_gradient(logits_NV, labels_N[:, 0].long(), -100, implementation)
    assert least <= ledger.peak_bytes <= most
