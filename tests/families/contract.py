"""The subjects of the contract of families: a base and data of a family, and its model, adapted, on a device."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.dataset.entry_spec import TensorSpec
from lora_rocm.device.transfer import DeviceTransfer, fingerprint
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors, family_for
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import BatchPlan, Prepared, loader, open_workers, prepare
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.planning.step_plan import StepRequirements
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train.engine import Engine
from lora_rocm.train.graphs import Passed
from tests.fake_encoders import image
from tests.families.toy_families import TOYS
from tests.lora_files import write_random_lora
from tests.tiny_anima import write_tiny_anima
from tests.tiny_flux import write_tiny_flux
from tests.tiny_llm import MODELS, write_tiny_llm
from tests.tiny_models import RUN_TARGETS, SHALLOW, write_tiny_sdxl
from tests.tiny_sd import SHALLOW_SD, write_tiny_sd
from tests.tiny_z_image import write_tiny_z_image
from tests.train.runs import start

CPU = torch.device("cpu")
FORMATS: dict[str, tuple[str, ...]] = {
    "sdxl": ("kohya",),
    "sd15": ("kohya", "diffusers", "peft"),
    "sd2": ("kohya", "diffusers"),
    "z-image": ("kohya", "diffusers", "peft"),
    "flux": ("kohya", "sd-scripts", "diffusers", "peft"),
    "anima": ("kohya", "diffusers", "peft"),
    "causal-lm": ("peft",),
    "toy-flow": ("diffusers", "peft"),
    "toy-video": ("diffusers", "peft"),
    "toy-edit": ("diffusers", "peft"),
    "toy-text": ("peft",),
}
TRAINING_ADAPTERS = {
    "sdxl": r".*attn[12]\.to_[qv]|down_blocks\.0\.resnets\.0\.conv1",
    "z-image": r"layers\.\d+\.(attention\.to_[qv]|feed_forward\.w[12])",
}
"""Modules that a training adapter changes, by family: some that are trained, and some that are not."""
TRANSFORMERS: dict[str, Callable[[Path], Path]] = {
    "z-image": write_tiny_z_image,
    "flux": write_tiny_flux,
    "anima": write_tiny_anima,
    "causal-lm": write_tiny_llm,
}
CONTROLS = {"flux": ("controls",), "toy-edit": ("controls", "controls 2")}
"""Folders of control images, by family."""
FRAMES = 5
CAPTIONS = ("a", "a b", "a b c d", "e f g")
SOME_OF_EACH = {
    "z-image": r"(layers|context_refiner)\.\d+\.(attention\.(to_q|to_out\.0)|feed_forward\.w2)",
    "flux": r"(single_)?transformer_blocks\.0\.(attn\.(to_q|add_v_proj|to_add_out)|ff\.net\.2|proj_out)",
    "causal-lm": r"model\.layers\.\d\.(self_attn\.(q_proj|o_proj)|mlp\.down_proj)",
    "anima": r"transformer_blocks\.\d\.(attn1\.to_q|attn2\.to_out\.0|ff\.net\.2)",
}
ARCHITECTURES = tuple(name for name in MODELS if name not in ("llama", "smollm"))
PACKED = "packed"
"""A variant of language models with samples that are packed into rows."""
TEXTS = ("one\r\ntwo", "three and four, and so on", "five six", "ä" * 15, "x" * 200)


@dataclass(frozen=True, eq=False)
class Its:
    """A family of the contract.

    formats: in which its result is written, each loaded back.
    variant: of language models, the architecture in place of the usual one, or PACKED.
    """

    name: str
    folder: Path
    lora: dict[str, Any]
    formats: tuple[str, ...]
    variant: str = ""
    _adapted: dict[torch.device, Adapted] = field(default_factory=dict)
    _straight: dict[torch.device, Path] = field(default_factory=dict)

    @classmethod
    def write(cls, name: str, folder: Path, variant: str = "") -> Its:
        """Write its data, and its base if that is one of files."""
        texts = TOYS[name].trains_on_texts
        for number, caption in enumerate(TEXTS if texts else CAPTIONS):
            if texts:
                (folder / "data").mkdir(parents=True, exist_ok=True)
                (folder / "data" / f"{number}.txt").write_text(caption, encoding="utf-8", newline="")
            else:
                # of z-image each of another length, in the multiple of tokens that it reads
                caption = caption.ljust(1 + 32 * number, "x") if name == "z-image" else caption
                image(folder / "data" / f"{number}.png", 64, 64, seed=number, caption=caption)
        if name == "toy-video":
            write_clips(folder / "data")
        if name == "sdxl":
            write_tiny_sdxl(folder / "base", **SHALLOW)
        elif name.startswith("sd"):
            scheduler = {"prediction_type": "v_prediction"} if name == "sd2" else {}
            write_tiny_sd(folder / "base", name, SHALLOW_SD, **scheduler)  # type: ignore[arg-type]
        elif variant in ARCHITECTURES:
            write_tiny_llm(folder / "base", variant)
        elif name in TRANSFORMERS:
            TRANSFORMERS[name](folder / "base")
        if name in CONTROLS:
            write_controls(folder)
        if pattern := TRAINING_ADAPTERS.get(name):
            its, component = cls.there(name, folder), TOYS[name].component
            write_random_lora(its.training_adapter, component, its.family.skeleton(component), pattern)
        return cls.there(name, folder, variant)

    @classmethod
    def there(cls, name: str, folder: Path, variant: str = "") -> Its:
        """As written before."""
        lora: dict[str, Any] = {"rank": 2, "targets": "attention-mlp"}
        if name in SOME_OF_EACH:
            lora |= {"targets": [SOME_OF_EACH[name]], "alpha": 1}
        elif not name.startswith("toy"):
            lora |= {"targets": [RUN_TARGETS], "train_text_encoder": name == "sd15"}
        if variant:
            lora |= {"targets": "all-linear"}
        return cls(name, folder, lora, FORMATS[name], variant)

    @property
    def training_adapter(self) -> Path:
        """The file of ``model.training_adapter``, in families that have one here."""
        return self.folder / "training.safetensors"

    @cached_property
    def recipe(self) -> Recipe:
        spec = TOYS[self.name]
        sizes = {"resolution": 64, "bucket_step": 32} if spec.reads("data.resolution") else {}
        sides = {"width": 64, "height": 64} if spec.reads("sample.width") else {}
        packing = {"packing": True, "max_length": 64} if self.variant == PACKED else {}
        places = [str(self.folder / each) for each in CONTROLS.get(self.name, ())]
        controls: dict[str, Any] = {"control_path": places[0] if len(places) == 1 else places} if places else {}
        controls |= {"bucket_max_aspect": 4} if len(places) > 1 else {}
        frames = {"frames": [FRAMES]} if self.name == "toy-video" else {}
        model = {"variant": "kontext"} if self.name == "flux" else {}
        if self.name in TRAINING_ADAPTERS:
            model = {"training_adapter": str(self.training_adapter)}
        shared = ("control_images", "control_images_2")
        previews = {key: [f"{place}/0.png"] for key, place in zip(shared, places, strict=False)}
        return recipe_from(
            {
                "model": {"family": self.name, "name_or_path": str(self.folder / "base"), **model},
                "data": {"path": str(self.folder / "data"), **sizes, **controls, **frames, **packing},
                "lora": self.lora,
                "optim": {"learning_rate": 1e-2},
                "train": {"max_train_steps": 4, "batch_size": 2, "mixed_precision": "no"},
                "sample": {"prompts": ["a zibu"], "steps": 2, **sides, **previews},
                "runtime": {"deterministic": True},
                "cache": {"dir": str(self.folder / "cache")},
                "output": {"save_every_n_steps": 2, "formats": self.formats},
            },
            TOYS,
        )

    @cached_property
    def family(self) -> ModelFamily:
        return family_for(self.recipe)

    @cached_property
    def cache(self) -> LatentCache:
        return LatentCache(Path(self.recipe.cache.dir))

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.recipe, self.family, Encoding(self.cache, CPU))

    def batches(self, size: int) -> Iterator[Batch]:
        """The batches of an epoch."""
        plan = BatchPlan(self.prepared.items, size, 1, 0)
        workers = open_workers(self.cache, self.prepared.entries, self.recipe.runtime)
        yield from loader(plan, self.family, workers, 0, plan.steps_per_epoch)
        workers.close()

    def adapted(self, device: torch.device) -> Adapted:
        """The model as it is trained plainly, one for all tests: each leaves it so."""
        if device not in self._adapted:
            self._adapted[device] = Adapted(self, device)
        return self._adapted[device]

    def straight(self, device: torch.device) -> Path:
        """The directory of a run from its start to its end, one for all tests."""
        if device not in self._straight:
            run_dir = self.folder / f"straight on {device.type}"
            assert start(self.recipe, run_dir, device=device)
            self._straight[device] = run_dir
        return self._straight[device]

    @cached_property
    def batch(self) -> Batch:
        """The first with two samples."""
        return next(batch for batch in self.batches(2) if len(set(batch.sample_keys)) == 2)

    def singles(self) -> list[Batch]:
        """The samples of ``batch``, each alone."""
        alone = {batch.sample_keys[0]: batch for batch in self.batches(1)}
        return [alone[key] for key in self.batch.sample_keys]


def write_controls(folder: Path) -> None:
    """Write two control images for each image, of other sizes; the second one of the first image is of yet another."""
    for number in range(len(CAPTIONS)):
        image(folder / "controls" / f"{number}.png", 96, 64, seed=9 - number)
        image(folder / "controls 2" / f"{number}.png", *((128, 48) if number else (48, 128)), seed=19 - number)


def write_clips(folder: Path) -> None:
    """Replace all images except the first with clips; the first clip is longer than is used."""
    for number in range(1, len(CAPTIONS)):
        (folder / f"{number}.png").unlink()
        for frame in range(FRAMES + 2 * (number == 1)):
            image(folder / f"{number}" / f"frame_{frame}.png", 64, 64, seed=1000 * number + frame)


class Adapted:
    """The model of a family with an adapter that has moved from its start."""

    def __init__(self, its: Its, device: torch.device, offloads: bool = False) -> None:
        self.family, self.pin = family_for(its.recipe), device.type == "cuda"
        self.model: LoadedModel = self.family.load(torch.float32, CPU)
        self.adapter = inject(self.family, self.model, its.recipe.lora, 0)
        attach_training_adapter(self.family, self.model, its.recipe.model.training_adapter)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for leaf in self.adapter.leaves.values():
                leaf.add_(0.1 * torch.randn(leaf.shape, generator=rng))
        self.transfer = DeviceTransfer(device, pin=self.pin)
        self.memory = MemoryManager(StepRequirements(), offloads, offloads, print)
        self.model.place(self.memory.placement(self.family, self.model, self.transfer, self.pin))
        for component in self.model.components.values():
            component.train()
        self.family.fuse(self.model, triton=self.pin)
        self.memory.apply(self.family, self.model)
        self.weights = self.adapter.flatten(torch.float32, torch.float32)
        scale = torch.ones((), device=device)
        self.engine = Engine(self.family, self.model, self.weights, scale, nullcontext)

    def sent(self, batch: Batch, seeds: Sequence[int] = (1, 2)) -> tuple[Tensors, Tensors]:
        """(batch, draws) on the device, as the loop sends them."""
        draws = self.family.objective.draw(batch.tensors, seeds).tensors
        sums = {name: fingerprint(tensor_B) for name, tensor_B in {**batch.tensors, **draws}.items()}
        tensors, _ = self.transfer.send({**batch.tensors, **draws}, sums)
        return {name: tensors[name] for name in batch.tensors}, {name: tensors[name] for name in draws}

    def passed(self, batch: Batch, seeds: Sequence[int] = (1, 2)) -> tuple[Passed, Tensor]:
        """The losses of a pass, and its gradients [N]."""
        self.weights.drop_gradients()
        passed = self.engine.run(*self.sent(batch, seeds))
        return passed, self.weights.gradients.clone()


def tensors_of(family: ModelFamily) -> dict[str, TensorSpec]:
    """The cached tensors of a sample, by name."""
    return {name: spec for encoder in family.encoders() for name, spec in encoder.entry.tensors.items()}


def die(its: Its, run_dir: Path, device: torch.device) -> None:
    """Train, and end this process as a power cut does, at the first pass behind a checkpoint."""
    run = Engine.run

    def deadly(self: Engine, *args: Any) -> Any:
        if RunDir(run_dir).list_checkpoints():
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, *args)

    Engine.run = deadly  # type: ignore[method-assign]
    start(its.recipe, run_dir, device=device)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    name, folder, variant, run_dir, device = sys.argv[1:]
    die(Its.there(name, Path(folder), variant), Path(run_dir), torch.device(device))
