"""The contract of every model family, from its cache to its result: the families of the program, and three toys.

``pytest -m gpu`` makes the same on a GPU; ``-m slow`` starts and kills real children.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.checks.kernel_check import cases_for
from lora_rocm.children import plan
from lora_rocm.children.check_base import weigh
from lora_rocm.commands import train as command
from lora_rocm.commands.check import check, render
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import family_for
from lora_rocm.families.common.block_inputs import BlockInputs
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.loader.batch import Batch, split
from lora_rocm.memory.footprint import count, meta_model
from lora_rocm.planning.data_plan import Seen
from lora_rocm.planning.step_plan import activation_bytes
from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import PlanJob
from lora_rocm.processes.tool import write_job
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.report.report import write_report
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import artifacts, input_start, preview
from lora_rocm.train.disk_forecast import Sizes, sizes_of
from lora_rocm.train.graphs import Graphs, Passed
from lora_rocm.train.input_start import InputSketch
from lora_rocm.train.session import Session
from tests.event_lines import read_events
from tests.families.causal_lm.test_experts import refusing_all_but_bf16
from tests.families.contract import ARCHITECTURES, CPU, PACKED, Adapted, Its, die, tensors_of
from tests.families.toy_families import TOYS
from tests.memory.test_footprint import Real
from tests.train.runs import start
from tests.train.test_graphs import Fake
from tests.wording import says, worded

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # of later versions of Python
]
SLOW = ("toy-flow", "toy-video", "toy-text", "z-image", "flux", "anima")
WORKER = "tests.families.toy_worker"
CLOSE = 2e-5
"""Between a batch and its samples, as a share: sums of some hundred products in float32, taken in another order."""


ALIKE = ("sd15", "sd2", "toy-flow")
"""Families that share the code of others: of sdxl, and of toy-video and the flows of the program."""


def families(*slow: str) -> list[Any]:
    """All families, with these as further slow ones. causal-lm has a test of its kinds."""
    return [
        *(pytest.param(name, marks=pytest.mark.slow) if name in (*ALIKE, *slow) else name for name in TOYS.names),
        *(pytest.param(f"causal-lm {variant}", marks=pytest.mark.slow) for variant in (*ARCHITECTURES, PACKED)),
    ]


@pytest.fixture(scope="module", params=families())
def its(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Its:
    name, _, variant = request.param.partition(" ")
    return Its.write(name, tmp_path_factory.mktemp(name), variant)


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    """A run inside this process asks for deterministic kernels."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """On a GPU only deterministic kernels, so that bits can be compared."""
    if request.param == "cpu":
        yield CPU
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield torch.device("cuda", 0)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 a GPU's convolutions keep ten bits, and differ by that between batches of one and of two."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def _grouped_products_of_a_gpu() -> Iterator[None]:
    with refusing_all_but_bf16():
        yield


def off(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, as a share."""
    return float((found - wanted).norm() / wanted.norm())


def test_the_two_halves_of_a_family_agree(its: Its) -> None:
    family, spec = its.family, its.recipe.spec
    assert (family.name, tuple(family.text_components)) == (spec.name, tuple(spec.text_components))
    assert spec.component in family.all_components and set(spec.text_components) <= set(family.all_components)
    assert set(family.lora_targets[next(iter(family.lora_targets))]) == {spec.component, *spec.text_components}


def test_cached_samples_make_batches_whose_gradients_reach_the_adapter_alone(its: Its, device: torch.device) -> None:
    adapted, batch = its.adapted(device), its.batch
    assert set(tensors_of(family_for(its.recipe))) <= set(batch.tensors)
    passed, gradients_N = adapted.passed(batch)
    assert torch.isfinite(passed.loss_B).all() and (passed.loss_B > 0).all() and len(passed.loss_B) == 2
    assert torch.isfinite(gradients_N).all()
    assert all(part.any() for part in adapted.weights.views(gradients_N).values()), "each trained tensor has its share"
    trained = {id(leaf) for leaf in adapted.adapter.leaves.values()}
    for component in adapted.model.components.values():
        for name, parameter in component.named_parameters():
            assert parameter.requires_grad is (id(parameter) in trained), name
            assert parameter.grad is None, name
    assert adapted.model.placement is not None and not adapted.model.placement.changed()


def test_an_example_is_as_a_batch_of_its_shape(its: Its) -> None:
    """Only padded tensors may have another size."""
    batch, family = its.batch, its.family
    example = family.example(batch.shape, 2)
    assert set(example) == set(batch.tensors) - {"weight"}
    for name, tensor in example.items():
        spec = tensors_of(family).get(name)
        assert (tensor.dtype, tensor.ndim) == (batch.tensors[name].dtype, batch.tensors[name].ndim), name
        assert (spec is not None and spec.pad is not None) or tensor.shape == batch.tensors[name].shape, name


@pytest.mark.usefixtures("_exact_convolutions")
def test_a_batch_is_its_samples(its: Its, device: torch.device) -> None:
    """Each sample alone has no padding but its own."""
    adapted = its.adapted(device)
    together, wanted_N = adapted.passed(its.batch)
    alone = [adapted.passed(single, [seed]) for single, seed in zip(its.singles(), (1, 2), strict=True)]
    assert off(torch.cat([passed.loss_B for passed, _ in alone]), together.loss_B) < CLOSE
    weights = its.batch.tensors["weight"].tolist()
    summed_N = sum(weight * gradients_N for weight, (_, gradients_N) in zip(weights, alone, strict=True))
    assert off(summed_N, wanted_N) < CLOSE  # type: ignore[arg-type]
    assert off(together.loss_B.flip(0), together.loss_B) > 100 * CLOSE, "the control: the samples differ"


@pytest.mark.usefixtures("_exact_convolutions")
def test_padding_changes_nothing(its: Its, device: torch.device) -> None:
    """Three more at the end of each padded axis, with the usual padding value; or the whole axis twice."""
    adapted, batch = its.adapted(device), its.batch
    padded = {name: spec for name, spec in tensors_of(its.family).items() if spec.pad is not None}
    if not padded:
        assert its.name in ("flux", "anima", "toy-video"), "texts of one length"
        return
    tensors = dict(batch.tensors)
    for name, spec in padded.items():
        assert spec.pad is not None
        axis = 1 + spec.dims.index(spec.pad.axis)
        shape = list(tensors[name].shape)
        shape[axis] = 3
        more = tensors[name] if spec.pad.repeats else tensors[name].new_full(shape, spec.pad.value)
        tensors[name] = torch.cat([tensors[name], more], axis)
    (plain, plain_N), (found, found_N) = adapted.passed(batch), adapted.passed(replace(batch, tensors=tensors))
    assert off(found.loss_B, plain.loss_B) < CLOSE and off(found_N, plain_N) < CLOSE
    if all(spec.pad is not None and spec.pad.repeats for spec in padded.values()):
        zeros = {name: torch.cat([batch.tensors[name], torch.zeros_like(batch.tensors[name])], 1) for name in padded}
        seen, _ = adapted.passed(replace(batch, tensors={**batch.tensors, **zeros}))
        assert off(seen.loss_B, plain.loss_B) > 10 * CLOSE, "the control: zeros are read"
        return
    hiding = next(name for name in padded if "mask" in name)
    tensors[hiding] = torch.ones_like(tensors[hiding])
    seen, _ = adapted.passed(replace(batch, tensors=tensors))
    assert off(seen.loss_B, plain.loss_B) > 10 * CLOSE, "the control: without its mask the padding counts"


@pytest.mark.parametrize("its", families("sdxl", "toy-video", "toy-text"), indirect=True)
@pytest.mark.usefixtures("_grouped_products_of_a_gpu")
def test_the_footprint_is_that_of_a_real_pass(its: Its) -> None:
    """SDXL has its own tests (tests/memory/test_footprint.py).

    Samples are larger than in a run, because pieces of the allocator (512 bytes) and text states take most of the
    smallest samples' memory. The meta device has a grouped product only for bfloat16, and here the CPU, too.
    """
    axes = {name: length * (1 if name == "frames" else 3) for name, length in its.batch.shape.axes}
    real = Real(its.recipe, SampleShape.of(**axes))
    found = count(real.family, meta_model(real.family, its.recipe, torch.float32, False), its.recipe, real.shape)
    assert len(found.blocks) == len(real.family.blocks(real.model))
    assert activation_bytes(found, ()) == pytest.approx(real.activations([]), rel=0.1)
    every, blocks = range(len(found.blocks)), real.family.blocks(real.model)
    assert activation_bytes(found, every) == pytest.approx(real.activations(None), rel=0.1)
    # blocks that keep attention's output; and their inputs in main memory, with the slots for those that come back
    kept = real.activations(None, apart=True, keeping_attention=blocks)
    assert activation_bytes(found, every, (), every) == pytest.approx(kept, rel=0.1)
    inputs = BlockInputs(blocks, DeviceTransfer(CPU, pin=False), pin=False)
    moved = real.activations(None, apart=True, inputs=inputs) + inputs.slot_bytes
    assert activation_bytes(found, every, (), (), True) == pytest.approx(moved, rel=0.1)


def test_what_is_not_kept_gives_the_plain_gradients_to_the_bit(its: Its, device: torch.device) -> None:
    """All blocks recomputed, every other one, and all of them offloaded."""
    adapted = its.adapted(device)
    plain, wanted_N = adapted.passed(its.batch)
    family, model = adapted.family, adapted.model
    blocks = family.blocks(model)
    for chosen in (None, blocks[::2]):
        family.recompute_activations(model, Recomputing(model, chosen))
        assert same(adapted, its, plain, wanted_N) > len(blocks), "blocks are called as modules, again on the way back"
    family.recompute_activations(model, Recomputing(model, together=True))
    assert same(adapted, its, plain, wanted_N) > len(blocks), "several as one segment"
    family.recompute_activations(model, Recomputing(model, keeping_attention=blocks[1:], unpacks_once=True))
    assert same(adapted, its, plain, wanted_N) > len(blocks), "attention's output kept, but of the first block"
    inputs = BlockInputs(blocks, adapted.transfer, adapted.pin)
    for _ in range(2):
        family.recompute_activations(model, Recomputing(model, inputs=inputs, unpacks_once=True))
        assert same(adapted, its, plain, wanted_N) > len(blocks), "inputs in main memory"
    assert inputs.host_bytes and not adapted.transfer.bad
    family.recompute_activations(model, Recomputing(model, ()))
    assert same(adapted, its, plain, wanted_N) == len(blocks), "the control"
    offloaded = Adapted(its, device, offloads=True)
    assert same(offloaded, its, plain, wanted_N) > len(blocks)
    assert (
        offloaded.memory.offload is not None and offloaded.memory.offload.fetched_bytes and not offloaded.transfer.bad
    )


def same(adapted: Adapted, its: Its, plain: Passed, wanted_N: Tensor) -> int:
    """Looks whether a pass gives these bits; how often blocks were called."""
    calls: list[int] = []
    hooks = [
        block.register_forward_pre_hook(lambda *_: calls.append(1)) for block in adapted.family.blocks(adapted.model)
    ]
    passed, found_N = adapted.passed(its.batch)
    for hook in hooks:
        hook.remove()
    assert torch.equal(passed.loss_B, plain.loss_B) and torch.equal(found_N, wanted_N)
    return len(calls)


@pytest.mark.usefixtures("_exact_convolutions")
def test_a_batch_in_parts_has_the_gradients_of_the_whole(its: Its, device: torch.device) -> None:
    adapted = its.adapted(device)
    plain, wanted_N = adapted.passed(its.batch)
    adapted.weights.drop_gradients()
    passed = [
        adapted.engine.run(*adapted.sent(part, [seed])) for part, seed in zip(split(its.batch, 2), (1, 2), strict=True)
    ]
    assert off(adapted.weights.gradients, wanted_N) < CLOSE
    assert off(torch.cat([each.loss_B for each in passed]), plain.loss_B) < CLOSE


def test_captured_passes_are_the_eager_ones(its: Its, device: torch.device) -> None:
    """Here a capture is a function that runs again; on a GPU it is one."""
    adapted, fake, said = its.adapted(device), Fake(), list[str]()
    steps = [
        (its.batch if step % 2 else replace(its.batch, tensors=flipped(its.batch)), (2 * step, 2 * step + 1))
        for step in range(4)
    ]
    wanted = [adapted.passed(*step) for step in steps]
    graphs = adapted.engine.graphs = Graphs(adapted.weights, True, SimpleNamespace(notice=said.append))
    if device.type == "cpu":
        fake.graphs = graphs
        graphs.new_capture = lambda: fake
    for step, (passed, gradients_N) in zip(steps, wanted, strict=True):
        found, found_N = adapted.passed(*step)
        assert torch.equal(found.loss_B, passed.loss_B) and torch.equal(found_N, gradients_N)
    if said:  # where the grouped product of experts takes no float32, transformers' own reads sizes on the CPU
        assert (
            its.variant in ("mixtral", "qwen3_moe", "gemma4_experts")
            and device.type == "cuda"
            and not any(graphs.captured.values())
        ), said
    else:
        assert any(graphs.captured.values())
    adapted.engine.release()
    adapted.engine.graphs = None


@pytest.mark.parametrize(
    "variant",
    [*(pytest.param(name, marks=pytest.mark.slow) if name == "mistral" else name for name in ARCHITECTURES), PACKED],
)
def test_each_kind_of_language_model_keeps_the_main_part_of_it(variant: str, tmp_path: Path) -> None:
    """The complete test is slow."""
    its = Its.write("causal-lm", tmp_path, variant)
    test_a_batch_is_its_samples(its, CPU)
    test_padding_changes_nothing(its, CPU)
    test_what_is_not_kept_gives_the_plain_gradients_to_the_bit(its, CPU)
    test_a_batch_in_parts_has_the_gradients_of_the_whole(its, CPU)


def flipped(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch with its rows exchanged."""
    return {name: tensor_B.flip(0).contiguous() for name, tensor_B in batch.tensors.items()}


def killed(its: Its, run_dir: Path, device: torch.device) -> None:
    """A run in a child that is killed: a fork of this process, or a new process if there is a GPU."""
    if device.type == "cpu":
        pid = os.fork()
        if not pid:
            try:
                die(its, run_dir, device)
            finally:
                os._exit(70)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return
    words = ["-m", "tests.families.contract", its.name, str(its.folder), its.variant, str(run_dir), str(device)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, *words], env=environ, check=False).returncode == -signal.SIGKILL


def result(run_dir: Path) -> Any:
    """The description of each file of a run, with its digest."""
    return json.loads(RunDir(run_dir).result.read_text(encoding="utf-8"))


def require_whole(its: Its, run_dir: Path) -> None:
    """The results of a run: its result is loaded back and compared before it is reported as done; previews exist."""
    exports = result(run_dir)["exports"]
    assert [export["format"] for export in exports] == list(its.formats)
    assert all(export["files"] and export["max_difference"] < 1e-2 for export in exports)
    made = [preview.existing(RunDir(run_dir), updates, its.recipe) for updates in (0, 4)]
    assert all(paths and all(path.stat().st_size for path in paths) for paths in made)


@pytest.mark.parametrize("its", families("toy-text"), indirect=True)  # which has a run through the command
def test_a_run_ends_with_a_result_that_is_loaded_back(its: Its, device: torch.device) -> None:
    require_whole(its, its.straight(device))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child is a fork")
@pytest.mark.parametrize("its", families("z-image", "anima", "toy-text", "toy-video"), indirect=True)
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    its: Its, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have the sizes that were forecast."""
    forecasts: list[Sizes] = []
    monkeypatch.setattr(artifacts, "sizes_of", lambda *how: forecasts.append(sizes_of(*how)) or forecasts[-1])
    killed(its, tmp_path / "killed", device)
    there = RunDir(tmp_path / "killed")
    assert [updates for updates, _ in there.list_checkpoints()] == [2] and not there.result.exists()
    assert start(its.recipe, tmp_path / "killed", device=device)
    found = result(tmp_path / "killed")
    assert found == result(its.straight(device))
    require_whole(its, tmp_path / "killed")
    written = {
        "checkpoint_bytes": sum(file.stat().st_size for file in there.list_checkpoints()[-1][1].glob("*.safetensors")),
        "lora_bytes": there.checkpoint_loras()[-1][1].stat().st_size,
        "exports_bytes": sum(file["bytes"] for export in found["exports"] for file in export["files"]),
    }
    assert asdict(forecasts[-1]) == pytest.approx(written, rel=0.01)


@pytest.mark.slow
def test_a_start_from_the_inputs_reads_those_of_each_linear_layer(its: Its, tmp_path: Path) -> None:
    """With offloaded blocks, fused layers and a packed base, as far as the family has them."""
    lora = its.recipe.lora.model_copy(update={"init": "eva"})
    train = its.recipe.train.model_copy(update={"max_train_steps": 1})
    runtime = its.recipe.runtime.model_copy(update={"memory": "offload"})
    recipe = its.recipe.model_copy(update={"lora": lora, "train": train, "runtime": runtime})
    seen = dict[str, Tensor]()

    def fill(weights: dict[str, Tensor], sketches: dict[str, InputSketch]) -> float:
        assert all(sketch.count > 0 for sketch in sketches.values()), "each layer was called"
        share = filled(weights, sketches)
        seen.update({name: weight.detach().clone() for name, weight in weights.items()})
        return share

    filled, input_start._fill = input_start._fill, fill
    try:
        assert start(recipe, tmp_path / "run")
    finally:
        input_start._fill = filled
    orthonormal = [torch.allclose(down @ down.T, torch.eye(len(down)), atol=1e-4) for down in seen.values()]
    assert seen and all(orthonormal), [name for name, fits in zip(seen, orthonormal, strict=True) if not fits]
    notices = [event["text"] for event in read_events(RunDir(tmp_path / "run").events()) if event["type"] == "notice"]
    assert says(notices, "families/init-eva-read")


@pytest.mark.parametrize("its", ["flux"], indirect=True)
def test_a_form_that_cannot_be_written_is_refused_before_training(its: Its, tmp_path: Path) -> None:
    """A DoRA of the queries alone: kohya's scripts have one weight of query, key and value."""
    lora = its.recipe.lora.model_copy(update={"use_dora": True, "targets": (r".*\.attn\.to_q",)})
    output = its.recipe.output.model_copy(update={"formats": ("sd-scripts",)})
    with pytest.raises(AdapterError, match="double_blocks_0_img_attn_qkv"):
        start(its.recipe.model_copy(update={"lora": lora, "output": output}), tmp_path / "run")
    assert not RunDir(tmp_path / "run").list_checkpoints()


def in_this_process(run_dir: RunDir, env: Any, on_event: Any, words: Any, notify: Any, asked: Any = None) -> int:
    """``worker.run_worker`` without a new Python."""
    module = words.index(WORKER)
    assert words[module + 1] == str(run_dir.path)
    code: int = importlib.import_module(WORKER).main(words[module + 1 :])
    for event in EventReader(run_dir.events()).poll():
        on_event(event)
    return code


def trained(its: Its, folder: Path, **how: Any) -> RunDir:
    """``lora-rocm train`` with the families of the tests."""
    recipe = folder / "toy recipe.yaml"
    recipe.write_text(dump_recipe(its.recipe), encoding="utf-8")
    overrides = ["runtime.device=cpu", "runtime.threads=1"]
    options = {"registry": TOYS, "worker": WORKER, "run_dir": folder / "run", **how}
    assert command.train(RunRequest(str(recipe), overrides, **options)) == 0
    return RunDir(folder / "run")


OF_IMAGES = re.compile("image|image|caption|pixel", re.IGNORECASE)


def test_texts_are_trained_on_without_a_word_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command, with the child's ``main`` in this process."""
    its = Its.write("toy-text", tmp_path)
    (tmp_path / "data" / "empty.txt").touch()
    (tmp_path / "data" / "list.csv").write_text("a,b", encoding="utf-8")
    monkeypatch.setattr("lora_rocm.supervisor.worker_process.run_worker", in_this_process)
    monkeypatch.setattr(Session, "_watch_parent", lambda self: None)
    run_dir = trained(its, tmp_path, supervised=False)
    said = capsys.readouterr().out
    events = read_events(run_dir.events())
    data = next(event for event in events if event["type"] == "data")
    assert data["buckets"] == {"16 tokens": 2, "32 tokens": 2, "96 tokens": 1} and data["samples"] == 5
    assert [problem["what"] for problem in data["set_aside"]] == [worded("families/the-text-is-empty")]
    assert "list.csv" in str(data["notices"]) and says(str(data["notices"]), "families/1-text-is-longer-than-the-model")
    written = sorted(run_dir.samples_at(4).glob("*.txt"))
    assert len(written) == 1 and written[0].read_text(encoding="utf-8").startswith("a zibu")
    report = write_report(run_dir, TOYS).read_text(encoding="utf-8")
    assert "a zibu" in report and "16 tokens" in report
    told = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", "", report, flags=re.DOTALL)
    assert not OF_IMAGES.search(said) and not OF_IMAGES.search(str(data)) and not OF_IMAGES.search(told)
    metadata = json.loads((next(run_dir.checkpoints.glob("step-*")) / "state.json").read_text(encoding="utf-8"))
    assert "zibu" not in str(metadata) and "three and four" not in str(metadata)


def test_check_says_what_texts_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    its = Its.write("toy-text", tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(dump_recipe(its.recipe), encoding="utf-8")
    said_of_it = {"check_base": to_json(weigh(its.recipe)), "check_texts": to_json(Seen())}
    child = lambda module, *job: said_of_it[module.rpartition(".")[2]]  # noqa: E731
    monkeypatch.setattr("lora_rocm.processes.tool.run_for_json", child)
    said = render(check(str(recipe), registry=TOYS)).replace(str(tmp_path), "")
    assert says(said, "families/texts-5-usable-0-set-aside") and says(said, "families/a-run-needs-7-texts-there")
    assert says(said, "families/steps-per-epoch-at-most-5") and "steps: 4," in said
    assert says(said, "families/1-text-is-longer-than-the-model-2")
    assert not OF_IMAGES.search(said)


def test_the_footprint_of_texts_is_that_of_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``lora-rocm plan`` has it counted."""
    its = Its.write("toy-text", tmp_path)
    job = write_job(tmp_path, PlanJob(its.recipe.model_dump(mode="json"), for_card=True, for_gpu=True))
    monkeypatch.setattr(sys, "argv", ["plan", str(job)])
    assert plan.main(TOYS) == 0
    assert json.loads(capsys.readouterr().out)["footprint"]["shape"] == "96 tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_supervised_run_of_a_toy_in_a_child_of_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    its = Its.write(name, tmp_path)
    run_dir = trained(its, tmp_path)
    assert [export["format"] for export in result(run_dir.path)["exports"]] == list(its.formats)
    assert run_dir.report.exists()
    trained(its, tmp_path, resume="latest")  # complete: nothing is started


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_kernel_of_a_step_is_compared_before_it_is_used(its: Its, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    used = count(its.family, meta_model(its.family, its.recipe, dtype), its.recipe, its.batch.shape).kernels
    assert used or its.name.startswith("toy"), "the control: kernels are counted"
    cases = cases_for(used, dtype)
    assert set(used) <= {kernel for case in cases for kernel in case.kernels}
    assert len(cases) <= 12
