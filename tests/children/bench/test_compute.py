"""The rows of the compute benchmark: the operations of a recipe's pass, at its shapes."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lora_rocm.checks.timing import MeasuredRow
from lora_rocm.children.bench.device_child import all_works, convolution
from lora_rocm.children.tune.attention import computed, random_inputs
from lora_rocm.children.tune.job import AttentionCall, Convolution, Laid, Product, RecipeWork
from lora_rocm.recipe.load import load_recipe

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # only named: nothing is allocated before a row is measured
BATCH, RANK = 3, 5


@pytest.fixture(scope="module")
def work() -> RecipeWork:
    changes = ["runtime.device=cpu", f"train.batch_size={BATCH}", "data.resolution=64", f"lora.rank={RANK}"]
    return RecipeWork.of(load_recipe("demo.yaml", changes).recipe)


def laid(*shape: int) -> Laid:
    return Laid.of(torch.empty(shape))


def of(works: list[MeasuredRow], group: str) -> list[MeasuredRow]:
    return [each for each in works if each.fields["group"] == group]


def test_the_shapes_are_those_of_the_recipe(work: RecipeWork) -> None:
    works = all_works(work)
    products = [each.fields["shape"] for each in of(works, "gemm")]
    assert any(RANK in shape for shape in products), "the products of the LoRA"
    assert {each.fields["shape"][0] for each in of(works, "attention")} == {BATCH}
    assert {each.fields["shape"][0] for each in of(works, "convolution")} == {BATCH}
    assert {each.fields["dtype"] for each in of(works, "attention")} == {str(work.dtype).removeprefix("torch.")}


def test_every_row_has_a_name_of_its_own(work: RecipeWork) -> None:
    for device in (CPU, GPU):
        rows = [tuple(map(str, each.fields.values())) for each in all_works(replace(work, device=device))]
        assert rows and len(set(rows)) == len(rows)


def test_a_gpu_has_convolutions_with_and_without_its_library(work: RecipeWork) -> None:
    on_gpu = of(all_works(replace(work, device=GPU)), "convolution")
    assert {each.fields["way"] for each in on_gpu} == {"cuDNN on", "cuDNN off"}
    assert {each.fields["way"] for each in of(all_works(work), "convolution")} == {"CPU"}


def test_every_row_can_be_called(work: RecipeWork) -> None:
    for group in ("gemm", "attention", "convolution"):
        for each in of(all_works(work), group)[:2]:
            each.prepare()()


def test_operations_are_counted() -> None:
    assert Product("mm", (laid(4, 6), laid(6, 3))).flops == 2 * 4 * 6 * 3
    pixels, kernel = (
        Laid((2, 4, 8, 8), (256, 64, 8, 1), torch.float32),
        Laid((6, 4, 3, 3), (36, 9, 3, 1), torch.float32),
    )
    strided = Convolution(pixels, kernel, (2, 6, 4, 4), (2, 2), (1, 1), (1, 1), 1)
    assert strided.flops == 2 * (2 * 6 * 4 * 4) * (4 * 9)
    own = torch.Generator().manual_seed(0)
    assert strided.run(pixels.random(CPU, own), kernel.random(CPU, own)).shape == strided.output


def test_convolutions_switch_the_library_and_put_it_back() -> None:
    before = torch.backends.cudnn.enabled
    pixels, kernel = (
        Laid((1, 4, 8, 8), (256, 64, 8, 1), torch.float32),
        Laid((4, 4, 3, 3), (36, 9, 3, 1), torch.float32),
    )
    convolution(CPU, Convolution(pixels, kernel, (1, 4, 8, 8), (1, 1), (1, 1), (1, 1), 1), enabled=not before)()
    assert torch.backends.cudnn.enabled == before


def test_a_backend_that_is_not_there_says_so() -> None:
    given = random_inputs(AttentionCall(1, 1, 4, 4, 8, False), CPU, torch.float32)
    computed(given, False, nullcontext)
    with pytest.raises(RuntimeError):
        computed(given, False, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
