"""The rows of the compute benchmark: sizes of the table, products as counted."""

import pytest
import torch

from lora_rocm.children.bench.compute import all_works, attention, convolution, gemm

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # only named: nothing is allocated before a row is measured


def fields(device: torch.device) -> list[dict[str, object]]:
    return [work.fields for work in all_works(device)]


def test_sizes_are_those_of_the_table_on_a_gpu() -> None:
    shapes = {(row["name"], row["way"]): row["shape"] for row in fields(GPU)}
    assert shapes["attention 640, base", "y"] == [4096, 640, 640]
    assert shapes["attention 1280, LoRA A", "dW"] == [1024, 1280, 16]
    assert shapes["feed forward, LoRA B", "dx"] == [1024, 16, 10240]
    assert shapes["cross attention, base", "y"] == [77, 2048, 1280]
    assert shapes["self 640", "flash, forward"] == [1, 10, 4096, 64]
    assert shapes["UNet 3x3, 320 channels", "cuDNN on"] == [1, 320, 128, 128]
    assert shapes["VAE 3x3, 128 channels", "cuDNN off"] == [1, 128, 1024, 1024]
    assert ("attention 640, base", "dW") not in shapes  # frozen


def test_without_a_gpu_tokens_shrink_and_widths_stay() -> None:
    shapes = {(row["name"], row["way"]): row["shape"] for row in fields(CPU)}
    assert shapes["attention 640, base", "y"] == [64, 640, 640]
    assert not any("off" in way for _, way in shapes)


def test_every_row_has_a_name_of_its_own() -> None:
    for device in (CPU, GPU):
        rows = [tuple(map(str, row.values())) for row in fields(device)]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("product", "shape"), [("y", (4, 3)), ("dx", (4, 6)), ("dW", (3, 6))])
def test_products_have_the_shapes_of_a_linear_layer(product: str, shape: tuple[int, int]) -> None:
    made = gemm(CPU, torch.float32, product, rows=4, width_in=6, width_out=3)()
    assert isinstance(made, torch.Tensor) and made.shape == shape


def test_convolutions_switch_the_library_and_put_it_back() -> None:
    before = torch.backends.cudnn.enabled
    made = convolution(CPU, torch.float32, (1, 4, 8, 8), enabled=not before)()
    assert isinstance(made, torch.Tensor) and made.shape == (1, 4, 8, 8)
    assert torch.backends.cudnn.enabled == before


def test_a_backend_that_is_not_there_says_so() -> None:
    call = attention(CPU, torch.float32, torch.nn.attention.SDPBackend.CUDNN_ATTENTION, (1, 1, 4, 8), both=False)
    with pytest.raises(RuntimeError):
        call()
