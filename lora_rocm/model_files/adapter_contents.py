"""Reads the contents of an adapter file for a model family: its modules, their strength and trained norms.

``inspect``, ``check``, ``train``, ``sample`` and ``compare`` all call ``contents_of``, so they judge every file alike.

The strength of an update is alpha / rank, which cannot be computed from the factors. A file that has lost its
alphas is refused: at another strength it would be a different adapter. A file that never had alphas is read at
strength 1, as every other program reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text
from lora_rocm.model_files.adapter_parts import KindParts, Notify, check_config, grouped, kind_with
from lora_rocm.model_files.adapter_spellings import PEFT_PREFIX, NamedModule, components, place_of, standard_names
from lora_rocm.model_files.peft_folder import PEFT_CONFIG

DIFFUSERS_METADATA = "lora_adapter_metadata"
DORA_NORM = "dora_norm"
"""Metadata key of our files in the comfyui format. Its value is "base" if DoRA's magnitudes refer to the norm of the
base weight.
"""
NORM_ENDINGS = (".w_norm", ".b_norm")
MAGNITUDES = ("magnitude", "toolkit_magnitude", "dora_scale")
PATTERN, MAX_WILDCARDS = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)*\$?"), 2


NOT_UNDERSTOOD = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Exceptions raised while reading a file or config that has values of the wrong type. ``not_understood`` explains
them.
"""
IMPLAUSIBLE = 1e9
"""Largest plausible magnitude of a weight: larger ones lead to infinities or NaN. Weights of published models are
below 1e5.
"""


class Shaped(Protocol):
    """A tensor, or the entry of a tensor in a file's header."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


Values = TypeVar("Values", bound=Shaped)
Asked = TypeVar("Asked", contravariant=True)


class Numbers(Protocol[Asked]):
    """Gives access to the values of a file's tensors."""

    def array(self, stored: Asked) -> Any:
        """Return the tensor's values as a float32 NumPy array."""

    def largest(self, stored: Asked) -> float:
        """Return the largest magnitude in a tensor: NaN or infinity if any value is, and 0 if the tensor is empty."""


OF_KOHYA = "ss_network_module"
"""Metadata key from kohya's tools that every single-file adapter written by this program has."""


@dataclass(frozen=True)
class StoredModule(Generic[Values]):
    """One adapted module in an adapter file.

    key: the module's name in the file.
    place: the model's module that the name refers to.
    parts: the tensors, keyed by role ("up", "alpha").
    alpha: value of the alpha tensor, or of PEFT's config if the module has no such tensor; None if neither exists.
    rank: rank in PEFT's config; None if the config was not used.
    rslora: whether alpha is divided by the square root of the rank instead of the rank.
    """

    key: str
    place: NamedModule
    parts: dict[str, Values]
    alpha: float | None
    rank: float | None
    rslora: bool

    @property
    def per_input(self) -> bool:
        """Whether this is a DoRA with one magnitude per input, judged by ComfyUI's rule.

        ``dora_scale`` has the shape [1, in, ...]. With one magnitude per output, the shape is [out, 1, ...]. So
        square layers can be distinguished, too.
        """
        found = self.parts.get("dora_scale")
        shape = () if found is None else tuple(found.shape)
        return len(shape) > 1 and shape[0] == 1 and not math.prod(shape) == self.parts["up"].shape[0] == 1


@dataclass(frozen=True)
class Contents(Generic[Values]):
    """Contents of an adapter file.

    modules: the adapted modules.
    unknown: names of modules and norms that no model of the family has.
    norms: the trained norms, keyed by tensor name.
    """

    kind: KindParts
    modules: list[StoredModule[Values]]
    unknown: list[str]
    norms: dict[str, Values]


def contents_of(
    family: str,
    tensors: Mapping[str, Values],
    path: Path,
    numbers: Numbers[Values],
    *,
    metadata: Mapping[str, str] | None = None,
    peft: Mapping[str, Any] | None = None,
    with_norms: bool = True,
    notify: Notify = lambda text: None,
) -> Contents[Values]:
    """Read and check the contents of an adapter file for a family.

    Args:
        family: value of ``model.family``.
        tensors: the file's tensors, by name.
        path: path of the file, for error messages.
        numbers: reads the values of the tensors.
        metadata: metadata of the file.
        peft: config of the PEFT folder that contains the file, or None if it is not in one.
        with_norms: whether trained norms are accepted. If not, a file with trained norms is refused.
        notify: called with each notice for the user.

    Raises:
        AdapterError: the file is not an adapter, has unsupported tensors, has lost its strength, or has numbers with
            which no model works.
    """
    tell, notify = notify, lambda text: tell(legible(text))
    if DORA_NORM in (metadata or {}):
        what = "This DoRA is in the comfyui format: its magnitudes fit ComfyUI's rule only."
        fix = "Use the file of the same run in the kohya or diffusers format."
        raise AdapterError("lora-magnitudes", what, where=str(path), fix=fix)
    # Sort the tensors: norms, modules, configs
    standard, norms = standard_names(tensors, path), dict[str, Values]()
    kind = kind_with(standard)
    dotted = tuple(f"{row.name}." for row in components(family) if row.own_prefixes)
    if with_norms and peft is None and not any(name.startswith(dotted) for name in standard):
        norms = {name: standard.pop(name) for name in sorted(standard) if name.endswith(NORM_ENDINGS)}
    groups = grouped(standard, path, kind, notify)
    configs = {"": dict(peft)} if peft is not None else _configs(metadata or {}, dotted, path)
    for config in configs.values():
        check_config({**config, "peft_type": config.get("peft_type", kind.peft_type)}, path, kind)
    # Find the module and the strength of each group
    found, unknown = list[StoredModule[Values]](), list[str]()
    for key, parts in groups.items():
        place = place_of(family, key)
        if place is None:
            unknown.append(key)
        elif "alpha" in parts:
            alpha = _alpha(f"{key}.alpha", parts["alpha"], path, numbers)
            found.append(StoredModule(key, place, parts, alpha, None, False))
        else:
            of_component = configs.get(f"{place.component}.", configs.get(""))
            found.append(_by_config(key, place, parts, of_component, kind, path, whole_config=peft is not None))
    _name_unused_patterns(configs if kind.alpha_of else {}, found, _config_place(path, peft is not None), notify)
    # Check the numbers, then the strength of the whole file
    for each in found:
        _check(each, kind, path, numbers)
    _check_zero_or_negative(found, norms, kind, path, notify)
    _require_plausible({name: numbers.largest(norm) for name, norm in norms.items()}, path)
    unknown += [name for name in norms if place_of(family, name.rpartition(".")[0], norm=True) is None]
    _check_strength(found, kind, path, metadata or {}, notify)
    return Contents(kind, found, unknown, norms)


def _check(module: StoredModule[Values], kind: KindParts, path: Path, numbers: Numbers[Values]) -> None:
    _check_factors(module)
    _check_products(module)
    _check_magnitudes(module, path)
    _check_numbers(module, kind, path, numbers)


def not_understood(error: BaseException, path: Path) -> AdapterError:
    """Return the error to show for a file if ``contents_of`` or a later step raised one of ``NOT_UNDERSTOOD``."""
    what = f"This LoRA cannot be understood: {error}."
    return AdapterError("lora-unreadable", what, where=str(path), fix="Use another file.")


def _configs(metadata: Mapping[str, str], dotted: Sequence[str], path: Path) -> dict[str, dict[str, Any]]:
    """Return each component's config in diffusers' metadata, keyed by the prefix of its module names ("unet.", or "").

    Raises:
        AdapterError: lora-strength: the metadata is not a JSON object.
    """
    configs: dict[str, dict[str, Any]] = {}
    try:
        fields = parse_json(metadata.get(DIFFUSERS_METADATA, "{}"))
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        what = f"The strength of this file is not known: {DIFFUSERS_METADATA} in its metadata is not a JSON object."
        raise _lost(what, path, "Save the adapter again, with the program that trained it.")
    for field, value in fields.items():
        component = next((start for start in dotted if field.startswith(start)), "")
        configs.setdefault(component, {})[field.removeprefix(component)] = value
    return configs


def _by_config(
    key: str,
    place: NamedModule,
    parts: dict[str, Values],
    config: Mapping[str, Any] | None,
    kind: KindParts,
    path: Path,
    *,
    whole_config: bool,
) -> StoredModule[Values]:
    """Return a module that has no alpha tensor: its alpha and rank come from the config, if there is one.

    ``whole_config``: whether the config is the file of a PEFT folder, which has all fields.

    Raises:
        AdapterError: lora-strength: alpha or rank is not in the config, or the config belongs to another adapter file.
    """
    if config is None or not kind.alpha_of:
        return StoredModule(key, place, parts, None, None, False)
    name, place_of_config = _peft_name(key, place), _config_place(path, whole_config)
    alpha_field, alpha = _value(config, "alpha_pattern", kind.config_alpha, name, place_of_config)
    rank_field, rank = _value(config, "rank_pattern", "r", name, place_of_config)
    actual = parts["down"].shape[0] if "down" in parts and len(parts["down"].shape) else None
    if rank is None and not whole_config and not kind.config_decides_rank:
        rank = actual  # diffusers' metadata; the factors have it
    for field, value in ((alpha_field, alpha), (rank_field, rank)):
        if as_number(value) is None:
            fault = f"the value {value!r:.80}, which is not a number" if value is not None else "no such field"
            what = f"The strength of {key:.200} is not known: its PEFT config needs {field}, but has {fault}."
            fix = f"Write the number with which it was trained to {field}, or use the {PEFT_CONFIG} saved with it."
            raise _lost(what, f"{place_of_config}: {field}", fix)
    if not isinstance(config.get("use_rslora") or False, bool):
        what = "The strength of this file is not known: use_rslora of its PEFT config is neither true nor false."
        raise _lost(what, f"{place_of_config}: use_rslora", "Set use_rslora to true or false, as in training.")
    if actual is not None and rank != actual:
        what = f"The PEFT config sets the rank {rank} for {key:.200}, but its factors in the file have rank {actual}."
        fix = f"Use the {PEFT_CONFIG} that was saved with this file, or write {actual} to {rank_field}."
        raise _lost(what, f"{place_of_config}: {rank_field}", fix)
    if config.get("use_dora") and set(MAGNITUDES).isdisjoint(parts):
        what = f"The PEFT config declares a DoRA (use_dora), but {key:.200} has no magnitudes."
        raise _lost(what, f"{place_of_config}: use_dora", "Save the adapter again, or set use_dora to false.")
    return StoredModule(key, place, parts, float(alpha), float(rank), bool(config.get("use_rslora")))


def _peft_name(key: str, place: NamedModule) -> str:
    """Return a module's name in the spelling that the patterns of a PEFT config use."""
    starts = (PEFT_PREFIX, f"{place.component}.")
    return next((key.removeprefix(start) for start in starts if key.startswith(start)), key)


def _config_place(path: Path, whole_config: bool) -> str:
    """Return the place of the PEFT config for messages: a file next to the weights, or a field of their metadata."""
    if not whole_config:
        return f"{path}: {DIFFUSERS_METADATA}"
    return str(path / PEFT_CONFIG if path.is_dir() else path.with_name(PEFT_CONFIG))


def _name_unused_patterns(
    configs: Mapping[str, Mapping[str, Any]], modules: Sequence[StoredModule[Values]], place: str, notify: Notify
) -> None:
    """Notify of keys in ``alpha_pattern`` and ``rank_pattern`` that match no module. Their values have no effect."""
    for start, config in configs.items():
        names = [
            _peft_name(each.key, each.place)
            for each in modules
            if "alpha" not in each.parts and start == (own if (own := f"{each.place.component}.") in configs else "")
        ]
        ends = {name[at:] for name in names for at in (0, *(dot.end() for dot in re.finditer(r"\.", name)))}
        for field in ("alpha_pattern", "rank_pattern") if names else ():
            keys = [key for key in config.get(field) or {} if key not in ends]  # PEFT's writers give ends of names
            unused = [key for key in keys if not any(_matches(key, name) for name in names)]
            if unused:
                more = f" and {count_text(len(unused) - 1, 'more key')}" if len(unused) > 1 else ""
                what = f"{place}: keys of {field} match no module of this file, so they have no effect"
                notify(f"{what}: {unused[0]:.200}{more}.")


def _check_zero_or_negative(
    modules: Sequence[StoredModule[Values]], norms: Mapping[str, Values], kind: KindParts, path: Path, notify: Notify
) -> None:
    """Refuse an adapter if all its modules have strength 0. Notify of single modules with zero or negative strength.

    kohya's programs replace an alpha of 0 by the rank, which gives strength 1. PEFT and ComfyUI read strength 0.

    Raises:
        AdapterError: lora-strength: no module has an effect.
    """
    strengths = {each.key: strength for each in modules if (strength := _strength(each, kind)) is not None}
    zero = [key for key, strength in strengths.items() if strength == 0]
    if zero and len(zero) == len(modules) and not norms:
        what = f"This file has no effect: the alpha of {zero[0]:.200}, and of every other module, is 0."
        raise _lost(what, path, "Write the alpha used in training to the file or its config, or use another file.")
    if zero:
        named = f"{count_text(len(zero), 'module')} such as {zero[0]:.200}"
        notify(f"{path.name}: the alpha of {named} is 0, so the file does not change these modules.")
    if negative := [key for key, strength in strengths.items() if strength < 0]:
        named = f"{count_text(len(negative), 'module')} such as {negative[0]:.200}"
        factor = f"{strengths[negative[0]]:.3g}"
        notify(f"{path.name}: the alpha of {named} is negative (strength {factor}): their update is subtracted.")


def _check_factors(module: StoredModule[Values]) -> None:
    """Refuse factors that cannot belong to a weight of any size.

    Raises:
        ValueError: factors are stored as integers, or their shapes do not fit each other.
    """
    for role, value in module.parts.items():
        if role != "alpha" and len(value.shape) and re.match(r"torch\.(u?int|bool)|[IU]\d+$|BOOL$", str(value.dtype)):
            raise ValueError(f"{module.key:.200} is stored as integers")
    shapes = {role: tuple(value.shape) for role, value in module.parts.items()}
    if "down" in shapes:
        down, up = shapes["down"], shapes["up"]
        if len(down) < 2 or len(up) < 2 or 0 in down:
            raise ValueError(f"the factors of {module.key:.200} have invalid shapes: {up} and {down}")
        if up[1] != down[0]:
            raise ValueError(f"the factors of {module.key:.200} have different ranks: {up[1]} and {down[0]}")


def _check_products(module: StoredModule[Values]) -> None:
    """Refuse factors of LoKr, LoHa and OFT with shapes that do not fit each other.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    shapes = {role: tuple(value.shape) for role, value in module.parts.items()}
    for name in ("lokr_w1", "lokr_w2", "hada_w1", "hada_w2"):
        # a factor is whole, or a product of two
        factor = [shapes[role] for role in (name, f"{name}_a", f"{name}_b") if role in shapes]
        if factor and (
            any(len(each) < 2 or 0 in each for each in factor) or len(factor) == 2 and factor[0][1] != factor[1][0]
        ):
            raise ValueError(f"the factors of {module.key:.200} have shapes that do not fit each other: {factor}")
    if "hada_w1_a" in shapes:
        sides = [(shapes[f"{name}_a"][0], math.prod(shapes[f"{name}_b"][1:])) for name in ("hada_w1", "hada_w2")]
        if sides[0] != sides[1] or shapes["hada_w1_b"][0] != shapes["hada_w2_b"][0]:
            raise ValueError(
                f"the two products of {module.key:.200} differ in shape ({sides[0]} and {sides[1]}) or in rank"
            )
    if "oft_blocks" in shapes and (len(shapes["oft_blocks"]) != 3 or len(set(shapes["oft_blocks"][1:])) != 1):
        raise ValueError(
            f"the blocks of {module.key:.200} have the shape {list(shapes['oft_blocks'])}, so they are not a diag-oft"
        )


def _check_magnitudes(module: StoredModule[Values], path: Path) -> None:
    """Refuse DoRA magnitudes if their number matches neither the outputs nor the inputs of the factors.

    Raises:
        AdapterError: lora-magnitudes.
    """
    for role in MAGNITUDES:
        if role not in module.parts:
            continue
        shape, down = tuple(module.parts[role].shape), tuple(module.parts["down"].shape)
        outputs, inputs, count = module.parts["up"].shape[0], down[1], math.prod(shape)
        if count == outputs and (role != "dora_scale" or shape[:1] == (outputs,)):
            continue
        # the factor of a convolution may be flattened: its side is then a multiple of the inputs
        fits = count == inputs or (len(down) == 2 and count and inputs % count == 0)
        if role == "dora_scale" and len(shape) > 1 and shape[0] == 1 and shape[1] == count and fits:
            continue
        raise AdapterError(
            "lora-magnitudes",
            f"The DoRA magnitudes ({role}) of {module.key:.200} have the wrong shape {list(shape)}. The factors have "
            f"{outputs} outputs and {inputs} inputs, so {outputs} magnitudes are needed (one per output), or the shape "
            f"{[1, inputs]} (one per input).",
            where=str(path),
            fix="Use another file: this one is damaged, or belongs to another model.",
        )


def _check_numbers(module: StoredModule[Values], kind: KindParts, path: Path, numbers: Numbers[Values]) -> None:
    """Refuse numbers that no model can use, both in the tensors and in the update scaled by its strength.

    Raises:
        AdapterError: lora-not-finite, lora-constraint, lora-parts.
    """
    largest = {role: numbers.largest(value) for role, value in module.parts.items() if role != "alpha"}
    _require_plausible({f"{module.key:.200}: {role}": number for role, number in largest.items()}, path)
    if largest.get("on_input"):
        what = f"This IA3 scales the inputs of {module.key:.200}, which is not supported: it may only scale outputs."
        raise AdapterError("lora-parts", what, where=str(path), fix="Train it again without train_on_input.")
    if "oft_blocks" in module.parts and module.alpha is not None:
        _check_constraint(module, path, numbers)
    if (strength := _strength(module, kind)) is None:
        return
    factors = math.prod(number for role, number in largest.items() if role not in MAGNITUDES)
    if not abs(strength) * max(factors, 1.0) <= IMPLAUSIBLE:
        named = f"{module.key:.200}.alpha" if "alpha" in module.parts else f"{kind.config_alpha} of {module.key:.200}"
        what = f"{named} is {module.alpha:.6g}, so the update is multiplied by {strength:.3g}: no model works with that"
        raise _not_finite(what, path)


def _check_constraint(module: StoredModule[Values], path: Path, numbers: Numbers[Values]) -> None:
    """Refuse an OFT module if its constraint is small enough to limit the rotation."""
    assert module.alpha is not None, "asked for one with a constraint"
    blocks = numbers.array(module.parts["oft_blocks"])
    if math.isnan(module.alpha):
        raise _not_finite(f"{module.key:.200}.alpha is {module.alpha}", path)
    skew = (blocks - blocks.transpose(0, 2, 1)).reshape(-1)
    if module.alpha and math.sqrt(float(skew @ skew)) > module.alpha:
        what = f"The constraint of {module.key:.200} ({module.alpha:g}) limits its rotation, which is not supported."
        raise AdapterError("lora-constraint", what, where=str(path), fix="Train it again without a constraint.")


def _strength(module: StoredModule[Values], kind: KindParts) -> float | None:
    """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA. Return None if alpha is missing or has no effect."""
    if module.alpha is None:
        return None
    # a LoKr's rank is taken from its second product if that has one
    product = next((module.parts[role] for role in reversed(kind.alpha_of) if role in module.parts), None)
    if kind.config_decides_rank and module.rank is not None:
        rank = module.rank
    elif product is not None:
        rank = product.shape[0]
    else:
        return None
    return module.alpha / (math.sqrt(rank) if module.rslora else rank)


def _alpha(name: str, stored: Values, path: Path, numbers: Numbers[Values]) -> float:
    """Return the value of an alpha tensor.

    Raises:
        AdapterError: lora-strength: the tensor is a boolean.
        ValueError: the tensor does not have exactly one value.
    """
    if math.prod(stored.shape) != 1:
        raise ValueError(f"{name:.200} has the shape {list(stored.shape)} instead of a single value")
    if re.match(r"torch\.bool|BOOL$", str(stored.dtype)):
        what = f"The strength of this file is not known: {name:.200} is stored as true or false, not as a number."
        raise _lost(what, path, "Save the file again.")
    return float(numbers.array(stored).reshape(-1)[0])


def _require_plausible(largest: Mapping[str, float], path: Path) -> None:
    """Refuse tensors with values that are too large, infinite or NaN.

    ``largest``: largest magnitudes, keyed by tensor name.

    Raises:
        AdapterError: lora-not-finite.
    """
    for name, number in largest.items():
        if not number <= IMPLAUSIBLE:
            held = f"{number:.3g}, which is more than any working model has" if math.isfinite(number) else f"{number}"
            raise _not_finite(f"{name} contains {held}", path)


def _not_finite(what: str, path: Path) -> AdapterError:
    return AdapterError("lora-not-finite", f"{what}.", where=str(path), fix="Use another file: this one is damaged.")


def other_axis(module: str, shape: Sequence[int], path: Path) -> AdapterError:
    """Return the error for a start from a DoRA with one magnitude per input, which cannot be trained further.

    ``shape``: shape of the magnitudes.
    """
    return AdapterError(
        "init-from-axis",
        f"This file is a DoRA with one magnitude per input (dora_scale of {module:.200}: {list(shape)}). Training "
        "needs one magnitude per output, so it cannot start from this file.",
        where=f"lora.init_from: {path}",
        fix="Start without it, or from a DoRA that was trained with one magnitude per output (OneTrainer: Apply on "
        "output axis; LyCORIS: wd_on_output=True). lora-rocm sample can use this file.",
    )


def _check_strength(
    modules: Sequence[StoredModule[Values]], kind: KindParts, path: Path, metadata: Mapping[str, str], notify: Notify
) -> None:
    """Refuse a file if the strength of some modules is unknown.

    A single file with PEFT's names needs a PEFT config, except files of this program, which have the strength in
    their factors. They are recognised by kohya's fields in their metadata, which PEFT's own files never have.

    Raises:
        AdapterError: lora-strength.
    """
    scaled = [each for each in modules if not set(kind.alpha_of).isdisjoint(each.parts)]
    lost = [each for each in scaled if each.alpha is None]
    named = f"{count_text(len(lost), 'module')} such as {lost[0].key:.200}" if lost else ""
    if any(each.key.startswith(PEFT_PREFIX) for each in lost):
        if OF_KOHYA in metadata:
            return
        config = path / PEFT_CONFIG if path.is_dir() else path.with_name(PEFT_CONFIG)
        raise _lost(
            f"The strength of this file is not known, because {config} is missing. The file uses PEFT's names "
            f"({lost[0].key:.200}), and PEFT stores the strength in this config.",
            path,
            f"Copy {PEFT_CONFIG} from the folder of the saved adapter into this file's folder, and use that folder.",
        )
    if lost and len(lost) < len(scaled):
        what = f"The strength of {named} is not known: this file has alphas only for other modules."
        raise _lost(what, path, "Save the file again.")
    if any("toolkit_magnitude" in each.parts and re.match("lora_|lycoris_", each.key) for each in lost):
        what = f"The strength of {named} is not known: this is a DoRA of ai-toolkit, which stores no alphas."
        raise _lost(what, path, "Use a LoRA file, or a DoRA of another program.")
    dora = [each for each in scaled if not set(MAGNITUDES).isdisjoint(each.parts)]
    if dora and len(dora) < len(scaled):
        counts = f"{count_text(len(scaled) - len(dora), 'module')} of {len(scaled)}"
        notify(f"{path.name} is a DoRA, but {counts} have no magnitudes in it: they are read as plain LoRA.")
    if lost:
        notify(f"{path.name} has no alphas: it is read at strength 1, as other programs do.")


def _value(config: Mapping[str, Any], patterns: str, default: str, module: str, place: str) -> tuple[str, Any]:
    """Return the field of a PEFT config that applies to a module, and its value.

    Args:
        config: the PEFT config.
        patterns: name of the field that maps patterns of module names to values. The first match decides.
        default: name of the field that decides if no pattern matches.
        module: name of the module.
        place: place of the config, for messages.

    Raises:
        AdapterError: lora-strength: ``patterns`` does not map names to numbers. lora-unreadable: a key is not a name.
    """
    own = config.get(patterns) or {}
    if not isinstance(own, Mapping):
        what = f"The strength of this file is not known: {patterns} of its PEFT config does not map names to numbers."
        raise _lost(what, f"{place}: {patterns}", f"Use the {PEFT_CONFIG} that was saved with this file.")
    for key in own:
        if not _is_pattern(key):
            what = f"This LoRA cannot be understood: {key[:80]!r} in {patterns} is not a module name."
            fix = "Use names of modules as keys (layers.0.self_attn.q_proj or q_proj), or remove this key."
            raise AdapterError("lora-unreadable", what, where=f"{place}: {patterns}: {key[:80]}", fix=fix)
        if _matches(key, module):
            return f"{patterns}: {key[:80]}", own[key]
    return default, config.get(default)


def as_number(value: object) -> float | None:
    """Return a config value if it is a finite number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _matches(pattern: str, module: str) -> bool:
    """Return whether a key of a pattern field matches a module, by the rule of PEFT's ``get_pattern_key``."""
    return _is_pattern(pattern) and re.match(rf"(.*\.)?({pattern})$", module) is not None


def _is_pattern(key: str) -> bool:
    """Return whether a key is a simple pattern, as PEFT's writers produce it.

    Any other regular expression from an untrusted file is never tried, because it could backtrack endlessly.
    """
    return PATTERN.fullmatch(key) is not None and key.count(".*") <= MAX_WILDCARDS


def _lost(what: str, where: Path | str, fix: str) -> AdapterError:
    return AdapterError("lora-strength", what, where=str(where), fix=fix)
