"""The adapter: PEFT's LoRA layers in a frozen model, their weights by stable names, and LoRA files put into them.

Adapter weights are made on the CPU in float32 from one seed, whatever the base is.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.host.safe_path import python_command
from lora_rocm.kernels.lora_layer import with_lean_layers
from lora_rocm.kernels.weight_format import dense_weight
from lora_rocm.recipe.schema import LoraSection, OptimSection
from lora_rocm.train.flat import FlatWeights
from lora_rocm.train.lora_file import LoraEntry, adaptable, canonical, read_lora
from lora_rocm.train.lora_parts import Say
from lora_rocm.train.start_file import check_start

PEFT_NAME = "default"
INPUT_SCALE = "dora_input_scale"
EXAMPLES = 4
MATCHING_S = 20.0
"""For all modules of a component; what people write takes some milliseconds, and the process that does it some more."""
MATCHER = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
pattern, paths = json.load(sys.stdin)
print(json.dumps([path for path in paths if re.fullmatch(pattern, path)]))
"""


class Adapter:
    """The LoRA layers of a model.

    modules: module name ("unet.mid_block...to_q") -> (component, path inside it, PEFT layer), in a fixed order.
    leaves: "<module name>.lora_A" (or lora_B, magnitude) -> weight in its layer, in the same order.
    parameters: the same names -> trained weights: the leaves, until ``flatten`` sets masters apart.
    """

    def __init__(self, family: ModelFamily, model: LoadedModel) -> None:
        found = [
            (canonical(component, path), (component, path, layer))
            for component, root in model.components.items()
            for path, layer in root.named_modules()
            if isinstance(layer, LoraLayer)
        ]
        self.modules: dict[str, tuple[str, str, LoraLayer]] = dict(sorted(found, key=lambda item: item[0]))
        self.family = family
        self.text_components = set(family.text_components)
        self.read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = _read  # a run reads through its checked door
        self.leaves: dict[str, nn.Parameter] = {}
        for name, (_, _, layer) in self.modules.items():
            self.leaves[f"{name}.lora_A"] = layer.lora_A[PEFT_NAME].weight
            self.leaves[f"{name}.lora_B"] = layer.lora_B[PEFT_NAME].weight
            if PEFT_NAME in layer.lora_magnitude_vector:
                self.leaves[f"{name}.magnitude"] = layer.lora_magnitude_vector[PEFT_NAME].weight
        self.parameters: dict[str, Tensor] = dict(self.leaves)
        self._flat: FlatWeights | None = None

    @property
    def components(self) -> list[str]:
        """The adapted components, in a fixed order."""
        return sorted({component for component, _, _ in self.modules.values()})

    def flatten(self, base_dtype: torch.dtype, weight_dtype: torch.dtype) -> FlatWeights:
        """Lay all weights out for training, where they are now.

        The layers compute in the base's format, without autocast, unless there is a DoRA: its norms need float32.
        """
        lean = not any(layer.lora_magnitude_vector for _, _, layer in self.modules.values())
        self._flat = FlatWeights(self.leaves, base_dtype if lean else torch.float32, weight_dtype)
        self.parameters = self._flat.parameters
        return self._flat

    def state(self) -> dict[str, Tensor]:
        """A copy of every weight, on the CPU."""
        return self.read(self.parameters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over every weight, in place.

        Raises:
            AdapterError: names or shapes are not this adapter's.
        """
        wrong = tensors.keys() ^ self.parameters.keys()
        wrong |= {name for name in tensors.keys() - wrong if tensors[name].shape != self.parameters[name].shape}
        if wrong:
            raise AdapterError(
                "adapter-mismatch",
                f"{len(wrong)} weights of this checkpoint are not those of the adapter.",
                where=min(wrong),
                fix="The lora section of the recipe must be the one that the checkpoint was made with.",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
        if self._flat is not None:
            self._flat.publish()

    @contextmanager
    def using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Other weights for a while (the average, for previews and export), then the present ones again."""
        present = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self.load(tensors)
            yield
        finally:
            self.load(present)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model alone, for a while."""
        for _, _, layer in self.modules.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for _, _, layer in self.modules.values():
                layer.enable_adapters(True)
            for leaf in self.leaves.values():
                leaf.requires_grad_(True)

    def cast_inputs(self, enabled: bool) -> None:
        """Whether PEFT casts the input of every adapted layer to the adapter's float32.

        Off, what computes in the base's format or under autocast is spared copies. DoRA keeps it: it takes the base's
        norm in the format of its input.
        """
        for _, _, layer in self.modules.values():
            layer.cast_input_dtype_enabled = enabled or bool(layer.lora_magnitude_vector)

    @contextmanager
    def casting_inputs(self) -> Iterator[None]:
        """For what runs without autocast (the sampler), for a while."""
        self.cast_inputs(True)
        try:
            yield
        finally:
            self.cast_inputs(False)

    def groups(self, optim: OptimSection) -> list[dict[str, Any]]:
        """Optimizer parameter groups, one a component, with its peak learning rate."""
        groups = []
        for component in self.components:
            names = [name for name in self.parameters if name.startswith(component + ".")]
            rate = optim.learning_rate
            if component in self.text_components and optim.text_encoder_learning_rate is not None:
                rate = optim.text_encoder_learning_rate
            groups.append({"names": names, "component": component, "lr": rate})
        return groups

    def entries(self) -> dict[str, LoraEntry]:
        """The adapter at strength 1 as plain numbers: module name -> entry, on the CPU."""
        state = {name: tensor.float() for name, tensor in self.state().items()}
        return {
            name: LoraEntry(
                state[f"{name}.lora_A"],
                state[f"{name}.lora_B"],
                trained_scale(layer),
                state[f"{name}.magnitude"].flatten() if f"{name}.magnitude" in state else None,
            )
            for name, (_, _, layer) in self.modules.items()
        }

    @torch.no_grad()
    def start_from(self, entries: Mapping[str, LoraEntry]) -> None:
        """Take over the effect of a LoRA file that fits; modules that it does not have keep their (neutral) start."""
        for name, entry in entries.items():
            _fill(self.modules[name][2], entry)


def inject(
    family: ModelFamily, model: LoadedModel, lora: LoraSection, seed: int, say: Say = lambda text: None
) -> Adapter:
    """Put LoRA layers into a loaded model; with ``lora.init_from`` they start with that file's effect.

    A starts uniform (PEFT's default, Kaiming) from ``seed`` alone, B at zero, DoRA's magnitudes at the base's norms. A
    module whose rank in the file is lower than ``lora.rank`` keeps the file's effect: its further rows of A and columns
    of B start as new ones do.

    Args:
        family: knows the targets.
        model: what is adapted.
        lora: the recipe's section.
        seed: of the start.
        say: gets a sentence on what the file holds besides, and on ranks that are filled up.

    Raises:
        AdapterError: targets that match nothing, or a file that does not fit.
    """
    adapter = _with_layers(family, model, lora)
    _initialise(adapter, seed)
    if lora.init_from is not None:
        path = Path(lora.init_from).expanduser()
        absent = {name: family.skeleton(name) for name in family.text_components if name not in model.components}
        entries = read_lora(family, {**model.components, **absent}, path, say)
        check_start(family, lora, adapter.modules, entries, path)
        adapter.start_from(entries)
        lower = sorted({entry.rank for entry in entries.values() if entry.rank < lora.rank})
        if lower:
            ranks = " and ".join(map(str, lower))
            say(f"{path.name} has modules of rank {ranks}: they are filled up to lora.rank, with the same effect.")
    return adapter


def inject_hollow(family: ModelFamily, model: LoadedModel, lora: LoraSection) -> Adapter:
    """The same layers in a model on the meta device, without numbers: whatever their rank, they take no memory.

    Raises:
        AdapterError: targets that match nothing.
    """
    with torch.device("meta"):
        return _with_layers(family, model, lora)


def _with_layers(family: ModelFamily, model: LoadedModel, lora: LoraSection) -> Adapter:
    for component, pattern in _targets(family, model, lora).items():
        _inject(
            model.components[component],
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.effective_alpha,  # type: ignore[arg-type]  # PEFT divides by the rank; any number will do
                lora_dropout=lora.dropout,
                use_rslora=lora.use_rslora,
                use_dora=lora.use_dora,
                target_modules=pattern,
            ),
        )
    return Adapter(family, model)


def attach_file(
    family: ModelFamily, model: LoadedModel, path: Path, strength: float = 1.0, say: Say = lambda text: None
) -> Adapter:
    """Put a LoRA file into a loaded model, with the file's own modules and ranks.

    The model must hold every component that the file adapts (``lora_file.components_of``).

    Args:
        family: knows the names.
        model: what is adapted.
        path: the file.
        strength: multiplies the update (1 as trained), while a DoRA's magnitudes stay as trained; 0 is the base alone.
        say: gets a sentence on what the file holds besides.

    Raises:
        AdapterError: the file is missing, damaged, no LoRA, or of another model.
    """
    entries = {
        name: replace(entry, scale=entry.scale * strength)
        for name, entry in read_lora(family, model.components, path, say).items()
    }
    if strength == 0.0:
        return Adapter(family, model)
    use_dora = any(entry.magnitude is not None for entry in entries.values())
    for component, root in model.components.items():
        ranks = {
            p: entries[canonical(component, p)].rank for p, _ in adaptable(root) if canonical(component, p) in entries
        }
        if not ranks:
            continue
        rank = Counter(ranks.values()).most_common(1)[0][0]
        others = {f"^{re.escape(module)}": r for module, r in ranks.items() if r != rank}
        _inject(
            root,
            LoraConfig(
                r=rank,
                lora_alpha=rank,
                rank_pattern=others,
                alpha_pattern=dict(others),
                use_dora=use_dora,
                target_modules=_either(ranks),
            ),
        )
    adapter = Adapter(family, model)
    with torch.no_grad():
        adapter.start_from(entries)
        for name, entry in entries.items():
            if entry.input_magnitude is not None:
                _scale_inputs(adapter.modules[name][2], entry)
    return adapter


def _scale_inputs(layer: LoraLayer, entry: LoraEntry) -> None:
    """Apply a DoRA's magnitudes per input, which PEFT's layers have not: W diag(c) x = W (c x).

    The factors are a buffer, which goes where the layer's weights go.
    """
    base = layer.get_base_layer()
    factors = entry.input_scale(dense_weight(base).cpu())
    layer.register_buffer(INPUT_SCALE, factors.view(-1, 1, 1) if isinstance(base, nn.Conv2d) else factors)
    layer.register_forward_pre_hook(_scaled_input)


def _scaled_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *others = args
    factors: Tensor = getattr(layer, INPUT_SCALE)
    return ((x * factors).to(x.dtype), *others)


def _read(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def trained_scale(layer: LoraLayer) -> float:
    """What multiplies B @ A at strength 1."""
    rank = layer.r[PEFT_NAME]
    return float(layer.lora_alpha[PEFT_NAME] / (math.sqrt(rank) if layer.use_rslora[PEFT_NAME] else rank))


def _targets(family: ModelFamily, model: LoadedModel, lora: LoraSection) -> dict[str, str]:
    """Component -> regular expression of exactly the modules to adapt."""
    presets = family.lora_targets
    if isinstance(lora.targets, str) and lora.targets in presets:
        wanted = dict(presets[lora.targets])
    else:
        own = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        default = next(iter(presets.values()))
        wanted = {c: p if c in family.text_components else "|".join(own) for c, p in default.items()}
    chosen = {}
    for component, pattern in wanted.items():
        if component not in model.components:
            continue
        paths = [path for path, _ in adaptable(model.components[component])]
        fix = f"Presets: {', '.join(presets)}. Else a regular expression of Python's for whole module names."
        try:
            ours = pattern in (preset[component] for preset in presets.values())
            matching = [path for path in paths if re.fullmatch(pattern, path)] if ours else _matching(pattern, paths)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(
                "targets-invalid",
                f"This is no regular expression: {error}.",
                where=f"lora.targets: {pattern}",
                fix=fix,
            ) from error
        except subprocess.SubprocessError as error:
            raise AdapterError(
                "targets-endless",
                f"The modules' names could not be matched within {MATCHING_S:g} s: there are too many ways to try.",
                where=f"lora.targets: {pattern}",
                fix=f"Write it without repetitions inside repetitions, such as (.*)*. {fix}",
            ) from error
        if not matching:
            raise AdapterError(
                "targets-match-nothing",
                f"No module of {component} is matched.",
                where=f"lora.targets: {pattern}",
                fix=f"Presets: {', '.join(presets)}. Module names look like {', '.join(_spread(paths))}.",
            )
        chosen[component] = _either(matching)
    return chosen


def _matching(pattern: str, paths: Sequence[str]) -> list[str]:
    """The paths that a user's regular expression matches whole.

    Some expressions try more ways than there is time for, and nothing in a process can stop them: so another one does.

    Raises:
        re.error, OverflowError, RecursionError: it is none.
        subprocess.SubprocessError: it took too long, or too much.
    """
    re.compile(pattern)
    done = subprocess.run(
        python_command("-I", "-c", MATCHER),
        input=json.dumps([pattern, list(paths)]).encode("ascii"),
        capture_output=True,
        timeout=MATCHING_S,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def _inject(component: nn.Module, config: LoraConfig) -> None:
    with torch.random.fork_rng(devices=[]):  # PEFT's own initialisation must not move the global generator
        inject_adapter_in_model(with_lean_layers(config), component, PEFT_NAME)
    for layer in component.modules():
        if isinstance(layer, LoraLayer):
            for name in ("lora_A", "lora_B", "lora_magnitude_vector"):
                getattr(layer, name).to(torch.float32)


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int) -> None:
    """PEFT's default start, in float32 whatever the base is, drawn in the order of the names."""
    rng = torch.Generator().manual_seed(seed)
    for _, _, layer in adapter.modules.values():
        down = torch.empty(layer.lora_A[PEFT_NAME].weight.shape)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=rng)
        layer.lora_A[PEFT_NAME].weight.copy_(down)
        layer.lora_B[PEFT_NAME].weight.zero_()
        if PEFT_NAME in layer.lora_magnitude_vector:
            _set_magnitude(layer, _row_norms(dense_weight(layer.get_base_layer())))


def _fill(layer: LoraLayer, entry: LoraEntry) -> None:
    """Write an entry into a layer whose scale and rank may be others (no lower rank), with the same effect."""
    layer.lora_A[PEFT_NAME].weight[: entry.rank].copy_(entry.down)
    layer.lora_B[PEFT_NAME].weight.zero_()[:, : entry.rank].copy_(entry.up * (entry.scale / trained_scale(layer)))
    if PEFT_NAME in layer.lora_magnitude_vector:
        magnitude = entry.magnitude
        if magnitude is None:  # a plain LoRA in a DoRA layer: the magnitudes at which the normalisation does nothing
            magnitude = _row_norms(dense_weight(layer.get_base_layer()).cpu() + entry.update())
        _set_magnitude(layer, magnitude)


def _set_magnitude(layer: LoraLayer, magnitude_O: Tensor) -> None:
    weight = layer.lora_magnitude_vector[PEFT_NAME].weight
    weight.copy_(magnitude_O.reshape(weight.shape))


def _row_norms(weight: Tensor) -> Tensor:
    """Norm of each output row, in float32 (PEFT takes it in the base's format, which in bf16 is off by up to 0.4 %)."""
    return weight.float().flatten(1).norm(dim=1)


def _either(paths: Iterable[str]) -> str:
    return "|".join(re.escape(path) for path in sorted(paths))


def _spread(paths: list[str]) -> list[str]:
    """A few of many names, from all over."""
    step = max(1, len(paths) // EXAMPLES)
    return paths[step // 2 :: step][:EXAMPLES]
