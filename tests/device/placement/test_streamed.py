"""Encoders streamed layer by layer: the same bits as whole ones, every fetch checked, no second copy on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel

from lora_rocm.device import transfer
from lora_rocm.device.allocator import limit_now
from lora_rocm.device.placement import base, offloaded, streamed
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.placement.streamed import ENCODING_BYTES, Streamed, free_for_encoder, repeated_layers
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import is_packed, pack
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.rundir.run_context import NOBODY
from tests.device.fake_card import GPU, SETTINGS, FakeCard
from tests.supervisor.fake_run import listening

CPU = torch.device("cpu")
LAYERS, WIDTH, TOKENS = 4, 32, 12


def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": LAYERS, "vocab_size": 50}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def qwen3() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS + 1, "vocab_size": 50}
    model = Qwen3Model(Qwen3Config(**sizes, **heads))
    model.layers, model.norm = model.layers[:LAYERS], nn.Identity()  # as the encoder cuts it
    return model


def clip() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=50, max_position_embeddings=TOKENS))


MODELS = {"T5": t5, "Qwen3": qwen3, "CLIP": clip}


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def states(model: nn.Module, device: torch.device = CPU) -> list[Tensor]:
    """The last states of three captions, one after the other."""
    ids = torch.arange(3 * TOKENS, device=device).view(3, 1, TOKENS)
    return [model(input_ids=one).last_hidden_state.cpu() for one in ids]


def transfer_to(device: torch.device = CPU) -> DeviceTransfer:
    return DeviceTransfer(device, pin=device.type == "cuda")


def streaming(device: torch.device = CPU, said: list[str] | None = None) -> Streamed:
    context = NOBODY if said is None else listening(said)
    return Streamed(partial(transfer_to, device), lambda: 0, device.type == "cuda", context)


@pytest.mark.parametrize(("name", "stored"), [*((name, "none") for name in MODELS), ("T5", "nf4"), ("Qwen3", "int8")])
def test_a_streamed_encoder_gives_the_same_bits(name: str, stored: str) -> None:
    model, said = made(MODELS[name]), list[str]()
    pack(model, quantised(stored, r"(^|\.)(block|layers)\.\d+\."))
    wanted, door = states(model), streaming(said=said)
    door.place(model, "text_encoder")
    assert all(torch.equal(one, other) for one, other in zip(states(model), wanted, strict=True))
    assert door.changed() == [] and door.streaming() is None
    assert len(said) == 1 and f"{LAYERS} layers" in said[0] and "text_encoder" in said[0] and "0 B are free" in said[0]
    packed = [each for each in model.modules() if is_packed(each)]
    assert len(packed) == (0 if stored == "none" else 7 * LAYERS)
    names = [path for path, _ in model.named_parameters()]
    layers = [path for path in names if any(part.isdigit() for part in path.split("."))]
    assert 0 < len(layers) < len(names)
    assert not {f"text_encoder.{path}" for path in layers} & door.on_device().keys()
    assert {f"text_encoder.{path}" for path in set(names) - set(layers)} <= door.on_device().keys()


def test_an_encoder_that_fits_stays_whole_until_memory_runs_out() -> None:
    said = list[str]()
    weight_bytes = sum(p.numel() * p.element_size() for p in made(t5).parameters())
    for free_bytes, streams in ((weight_bytes + ENCODING_BYTES, False), (weight_bytes + ENCODING_BYTES - 1, True)):
        door, model = Streamed(transfer_to, partial(int, free_bytes), False, listening(said)), made(t5)
        door.place(model, "encoder")
        assert bool(said) is streams is (door.streaming() is None)
        assert len(door.on_device()) == (2 if streams else len([*model.parameters()]))
        if not streams:
            again = door.streaming()
            assert again is not None
            again.place(made(t5), "encoder")
            assert again.streaming() is None and "ran out" in said.pop()


@pytest.mark.parametrize("game_bytes", [0, 21 * GIB])  # 0: the control
def test_what_is_free_is_asked_when_an_encoder_moves(
    game_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A game that starts while another encoder works takes the memory that the next one would have had."""
    card, said = FakeCard(tmp_path, others=GIB).install(monkeypatch), list[str]()
    weight_bytes = sum(p.numel() * p.element_size() for p in made(t5).parameters())
    assert weight_bytes + ENCODING_BYTES < free_for_encoder(GPU, SETTINGS)
    door = Streamed(transfer_to, partial(free_for_encoder, GPU, SETTINGS), False, listening(said))
    door.place(made(clip), "first")
    assert said == []
    card.changed(others=GIB + game_bytes)
    door.place(made(t5), "second")
    assert [text.partition(" ")[0] for text in said] == (["second"] if game_bytes else [])
    assert card.limit == limit_now(GPU, SETTINGS), "the allocator is held to it as well"


def test_a_module_without_layers_is_sent_whole() -> None:
    door, said = Streamed(transfer_to, lambda: 0, False, listening(log := list[str]())), log
    door.place(made(lambda: nn.Linear(4, 4)), "encoder")
    assert said == [] and len(door.on_device()) == 2


@pytest.mark.parametrize("spoilt", [False, True])  # False: the control
def test_a_fetch_that_arrives_changed_is_found_before_its_results_are_kept(
    monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    class Spoiling(offloaded.Offload):
        def __init__(self, layers: list[nn.Module], rest: Resident, pin: bool) -> None:
            super().__init__(layers, rest, pin, self._spoil)
            self.count = 0

        def _spoil(self, place: Tensor, source: Tensor) -> None:
            offloaded.copy_into(place, source)
            self.count += 1
            if spoilt and self.count == LAYERS + 2:  # in the second caption
                place[7] ^= 1

    monkeypatch.setattr(streamed, "Offload", Spoiling)
    door, model = streaming(), made(t5)
    door.place(model, "encoder")
    assert door.changed() == []
    states(model)
    assert bool(door.changed()) is spoilt


def test_the_host_never_holds_the_layers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_layers() -> float:
        """The most memory in addition to the weights, in layers."""
        with Ledger(iter([transfer.position_table(CPU)])) as ledger:
            model = made(t5, torch.float32)
            ledger.mark()
            before = ledger.live_bytes
            streaming().place(model, "encoder")
            return (ledger.mark() - before) / one_layer

    for where in (offloaded, transfer):  # a fingerprint takes more than such small layers
        monkeypatch.setattr(where, "whole_fingerprint", lambda tensor: torch.zeros((), dtype=torch.int64))
    monkeypatch.setattr(base, "GROUP_BYTES", {False: 0, True: 0})
    one_layer = sum(p.numel() * 4 for p in repeated_layers(made(t5))[-1].parameters())
    monkeypatch.setattr(offloaded, "ARENA_BYTES", one_layer)
    assert most_layers() < offloaded.SLOTS + 1.1  # the slots on the device, which is the CPU here, and an arena
    monkeypatch.setattr(offloaded, "ARENA_BYTES", 1 << 20)  # the control: one arena for all
    assert most_layers() > 3.9


def test_layers_are_those_of_the_largest_outermost_list() -> None:
    inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))
    outer = nn.ModuleList([nn.ModuleDict({"inner": inner, "more": nn.Linear(2, 2)}), nn.Linear(3, 3)])
    other = nn.ModuleList(nn.Linear(5, 5) for _ in range(30))
    whole = nn.ModuleDict({"other": other, "outer": outer}).requires_grad_(False)
    assert repeated_layers(whole) == list(outer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_a_streamed_encoder_gives_the_bits_of_a_whole_one(name: str) -> None:
    device, found = torch.device("cuda", 0), []
    for door in (streaming(device), Resident(transfer_to(device))):
        model = made(MODELS[name])
        door.place(model, "encoder")
        found.append(states(model, device))
        assert door.changed() == []
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
