"""Describe a model file or folder: family, components and storage format; for an adapter, modules and readers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lora_rocm.errors import AdapterError, ModelError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.foundation.json_text import parse_json
from lora_rocm.foundation.terminal_text import legible, one_line
from lora_rocm.foundation.units import count_text, number_text, size_text
from lora_rocm.model_files.adapter_contents import as_number
from lora_rocm.model_files.adapter_sizes import alphas_of, ranks_of
from lora_rocm.model_files.adapter_spellings import any_rewritten, standard_names
from lora_rocm.model_files.component_folder import COMPONENT_CONFIG, weight_files
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, read_config
from lora_rocm.model_files.header import TensorFileHeader, read_header, refuse_gguf
from lora_rocm.model_files.models import (
    BASE_JUDGED_BY,
    BASES,
    INDEXES,
    OTHER,
    PARTS,
    index_of,
    is_of_class,
    model_of,
    models_in,
    pipeline_of,
)
from lora_rocm.model_files.peft_folder import PEFT_CONFIG, PEFT_WEIGHTS, peft_folders
from lora_rocm.model_files.readers import PROGRAMS, readers_of_file, spelling_of
from lora_rocm.model_files.recognise_adapter import families_with, foreign_name, kind_of, origin_of
from lora_rocm.model_files.storage_formats import (
    SCALED,
    quantised_error,
    refuse_quantised_config,
    refuse_scaled,
    scaled,
)
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import final_files

if TYPE_CHECKING:
    from lora_rocm.processes.jobs import BaseVerdict

Found = dict[str, Any]
"""The description that ``inspect`` returns, or a part of it, ready for JSON."""
STATE = "state.json"
AIDS = ("tokenizer", "scheduler")
"""Components of a diffusers folder that have no weights."""
LANGUAGE_MODEL, CAUSAL, CAUSAL_CLASSES = "language model", "causal-lm", ("ForCausalLM", "ForConditionalGeneration")
"""Title and name of the family of language models, and the endings of their class names in transformers."""
PICKLES = (".ckpt", ".bin", ".pt", ".pth")
WEIGHTS, RECIPES = (".safetensors", ".sft"), (".yaml", ".yml")
BUILTIN = "builtin:"
NOTED = (
    "modelspec.title",
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_sd_model_name",
    "ss_network_module",
    "ss_network_args",
    "ss_steps",
    "ss_num_epochs",
    "ss_learning_rate",
    "ss_optimizer",
)
"""Metadata keys about a file's origin that are shown."""
UNKNOWN, UNKNOWN_FILE = "an unknown model", "an unknown file"
EMPTY = ("", "{}", "None", "null")
MAX_SHOWN, MAX_NAMED, MAX_NEAR = 200, 6, 3
BLOCK = re.compile(r".*(?:blocks?|layers|attentions|resnets|refiner)[._]\d+[._](.+)|.*?[._](.+)")
"""Matches a tensor name. The group is the module's name within its block or, without blocks, within its component."""
PART_ALONE = (
    "this part alone cannot be used here: give the checkpoint with text encoders and VAE, or the whole diffusers folder"
)
FOLDER_ALONE = "to train it, give its folder with config.json and tokenizer"
NOT_TRAINED = "its family is known, but cannot be trained here"
STARTERS = ("LoRA", "LoRA and DoRA", "LoKr", "LoHa", "OFT", "IA3")
"""Kinds of adapter that ``lora.init_from`` can read."""


class Judge(Protocol):
    """Checks for which families a path can be ``model.name_or_path``, as ``lora-rocm check`` does."""

    def __call__(self, path: Path, families: Sequence[str]) -> Mapping[str, BaseVerdict]:
        """Return the verdict for each family."""


def judge_in_child(path: Path, families: Sequence[str]) -> Mapping[str, BaseVerdict]:
    """Check a path as a ``Judge`` does, in a child process, because the check imports the models' libraries.

    Raises:
        MachineError: the child process cannot run.
    """
    from lora_rocm.processes.jobs import InspectJob, Judgements
    from lora_rocm.processes.tool import ask

    return ask(InspectJob(path, tuple(families)), Judgements, os.environ).of_family


def inspect(path: Path, registry: FamilyRegistry = FAMILIES, judge: Judge = judge_in_child) -> Found:
    """Return the description of a file or folder, ready for JSON. ``documents.InspectDocument`` explains the keys.

    ``unusable`` is omitted if a family can be trained, or if the family is unknown. ``problem`` and ``notices`` can
    also be about an adapter.

    Args:
        path: the file or folder.
        registry: the families that can be trained.
        judge: decides which families can be trained on a base.

    Raises:
        ModelError: the path is missing, damaged, not a model, or in a refused format (pickle-refused, gguf-refused).
        MachineError: the child process that checks a base cannot run.
    """
    found = _judged(path, registry, judge)
    found["usable"] = bool(found["trainable"] or found.get("keys") or found.pop("no_model", False))
    return found


def _judged(path: Path, registry: FamilyRegistry, judge: Judge) -> Found:
    """Return the description without the key ``usable``."""
    found = inspect_headers(path, registry)
    candidates = found.pop("candidates", [])
    if not candidates:
        return found
    verdicts = judge(path, candidates)
    usable = [name for name in candidates if not verdicts[name].refusal]
    why = found.pop("unusable", "")
    found["trainable"] = usable
    if usable:
        found["families"] = [*dict.fromkeys((*found["families"], *usable))]
        found["needed"] = [*verdicts[usable[0]].needed]
        found["notices"] = [*verdicts[usable[0]].notices]
    else:
        found["unusable"] = why or verdicts[candidates[0]].refusal
        found["problem"] = dict(verdicts[candidates[0]].problem)
    return found


def inspect_headers(path: Path, registry: FamilyRegistry) -> Found:
    """Return the description of a file or folder, from names and headers alone.

    It may have the extra key ``candidates``: values of ``model.family`` for which the path may be a base.
    """
    if path.parts[:1] and path.parts[0].startswith(BUILTIN):
        return {"path": str(path), **_shipped(str(path), registry)}
    if path.is_dir():
        return {"path": str(path), **_folder(path, registry)}
    if not path.exists():
        what, fix = "There is no such file or folder.", "Correct the path. Download a model of the hub first."
        raise ModelError("model-missing", what, where=str(path), fix=fix)
    if path.suffix.lower() in PICKLES:
        raise ModelError(
            "pickle-refused",
            "This is a pickle file: loading one can run any program hidden in it, so only .safetensors is read.",
            where=str(path),
            fix="Use the .safetensors version of the file.",
        )
    refuse_gguf(path, str(path))
    if path.is_file() and path.suffix.lower() not in WEIGHTS:
        what = "This is a recipe" if path.suffix.lower() in RECIPES else "This is not a .safetensors file"
        raise ModelError(
            "not-a-model",
            f"{what}: inspect reads models and LoRA files.",
            where=str(path),
            fix="Give a .safetensors file, a folder of a model, or a run directory. For a recipe use lora-rocm check.",
        )
    return {"path": str(path), **_file(read_header(path), registry)}


def _file(header: TensorFileHeader, registry: FamilyRegistry) -> Found:
    sizes: Counter[str] = Counter()
    for entry in header.tensors.values():
        sizes[entry.dtype] += entry.end - entry.begin
    form = scaled(header.tensors)
    found = {
        "tensors": len(header.tensors),
        "bytes": sizes.total(),
        "dtypes": dict(sizes.most_common()),
        "quantised": None if form is None else form[0],
        "metadata": _metadata(header.metadata),
    }
    standard = _standard(header)
    kind = kind_of(standard.tensors)
    if not kind:
        model = {**_model(header, registry), **found}
        if unread := scaled(header.tensors, SCALED):
            model |= {"keys": {}, "unusable": quantised_error(unread[0], header.path, unread[1]).what}
        return model
    return {**_adapter(header, standard, kind, registry), **found}


def _standard(header: TensorFileHeader) -> TensorFileHeader:
    """Return the header with the tensor names of an adapter converted to standard names.

    It is unchanged if two tensors would get the same name.
    """
    try:
        return replace(header, tensors=standard_names(header.tensors, header.path))
    except AdapterError:
        return header


def _folder(path: Path, registry: FamilyRegistry) -> Found:
    """Return the description of a folder, from its configs: a model, a run, a run's checkpoint, or a PEFT adapter."""
    if (path / PEFT_CONFIG).is_file() or (path / PEFT_WEIGHTS).is_file():
        return inspect_headers(path / PEFT_WEIGHTS, registry)
    if (path / STATE).is_file() and (path / "adapter.safetensors").is_file():
        return {"title": "a training state of lora-rocm", "families": [], "trainable": [], "no_model": True}
    if RunDir(path).holds_run():
        loras = sorted(file.name for file in final_files(RunDir(path)))
        title = f"a run directory of lora-rocm ({', '.join(loras) or 'no LoRA file yet'}), for lora-rocm status"
        return {"title": title, "families": [], "trainable": [], "no_model": True}
    place = index_of(path)
    if place is None and (parts := peft_folders(path)):
        return _peft_folder(sorted(parts.values()), registry)
    if place is not None:
        return _diffusers_folder(path, read_config(place), registry)
    if (path / COMPONENT_CONFIG).is_file():
        return _component_folder(path, registry)
    aid = next((f" of a {each}" for each in AIDS if (path / f"{each}_config.json").is_file()), "")
    raise ModelError(
        "not-a-model",
        f"This folder{aid} has no {INDEXES[0]}, no {PEFT_CONFIG} and no {COMPONENT_CONFIG} of a component.",
        where=str(path),
        fix=_given_instead(path),
    )


def _peft_folder(parts: Sequence[Path], registry: FamilyRegistry) -> Found:
    """Return the description of a run's ``peft`` folder, which contains a PEFT folder for each component.

    A component that several models share, such as a text encoder, is assigned to the model of the other components.
    """
    from lora_rocm.commands.adapter_verdict import has_fault, refusals

    # find the families that fit all components
    found = {part.name: inspect_headers(part, registry) for part in parts}
    if len(found) == 1:
        return found[parts[0].name]
    known = [set(part["families"]) for part in found.values() if part["families"]]
    families = sorted(set.intersection(*known)) if known else []
    refused = {
        name: refusals(read_header(part / PEFT_WEIGHTS), families, registry)
        for name, part in zip(found, parts, strict=True)
    }
    trainable = [family for family in families if family in registry and not any(family in r for r in refused.values())]
    # describe each component, and the programs that read it
    why = next((error.what for errors in refused.values() for error in errors.values()), "")
    adapters = {name: part["adapter"] for name, part in found.items() if "adapter" in part}
    readers = [adapters[name]["readers"] for name in adapters if found[name]["families"]]
    for name in adapters:
        if not found[name]["families"] and readers:
            adapters[name]["readers"] = None if refused[name] else readers[0]
            found[name]["title"] = f"a {adapters[name]['kind']} for the {name} of the same model"
    if why and not trainable and any(map(has_fault, refused.values())):
        for adapter in adapters.values():
            adapter["readers"] = None
    return {
        "title": f"PEFT adapters of {len(found)} components",
        "families": families,
        "trainable": trainable,
        **({"unusable": why} if why and not trainable else {}),
        "components": {name: part["title"] for name, part in found.items()},
        "adapters": adapters,
    }


def _component_folder(path: Path, registry: FamilyRegistry) -> Found:
    """Return the description of the folder of a diffusers component or of a whole transformers model.

    Raises:
        ModelError: weights-missing.
    """
    found, above = _component(path, registry), index_of(path.parent)
    if not found["families"] and any(word in found["title"] for word in CAUSAL_CLASSES) and CAUSAL in registry:
        return {**found, "candidates": [CAUSAL]}  # only its config can identify it, not its names
    if not found["families"] or "unusable" in found:
        return found
    if found["part"] == LANGUAGE_MODEL:
        return {**found, "candidates": [name for name in found["families"] if name in registry]}
    whole = f": {path.parent}" if above is not None else ""
    return {**found, "unusable": f"this is one component: model.name_or_path takes the whole diffusers folder{whole}"}


def _component(path: Path, registry: FamilyRegistry) -> Found:
    """Return the description of a folder with a config and weights, even if a recipe cannot use it alone.

    Raises:
        ModelError: weights-missing, weights-damaged, weights-unreadable, config-unreadable.
    """
    # read the config and the headers of all weight files
    config = path / COMPONENT_CONFIG
    settings = read_config(config)
    named = settings.get("_class_name") or next(iter(_listed(settings.get("architectures"))), "")
    title, files = one_line(str(named))[:MAX_SHOWN], weight_files(path)
    if not files:
        what = f"This folder has a config.json{f' of {title}' if title else ''}, but no readable weights"
        raise ModelError("weights-missing", f"{what}.", where=str(path), fix=_given_instead(path))
    headers = [read_header(file) for file in files]
    tensors = {name: entry for header in headers for name, entry in header.tensors.items()}
    if len(tensors) != sum(len(header.tensors) for header in headers):
        what = "Two files of this folder contain the same tensors: they come from different downloads."
        raise ModelError("weights-damaged", what, where=str(path), fix=DOWNLOAD_AGAIN)
    # describe the weights, and compare them with the config
    whole = replace(headers[0], tensors=tensors)
    model = model_of(whole.shapes)
    found = {**_file(whole, registry), "part": "" if model is None else model.part, "trainable": []}
    for key in ("unusable", "candidates"):
        found.pop(key, None)
    known = UNKNOWN if found["title"] == UNKNOWN_FILE else found["title"]
    found["title"] = f"{known} ({title})" if title else known
    if title and model is not None and not is_of_class(model, title):
        mixed = f"the folder is mixed: its config is of {title}, its weights of {known}"
        return {**found, "unusable": mixed, "keys": {}}
    try:
        refuse_scaled(path, tensors)
        refuse_quantised_config(config, settings)
    except ModelError as error:
        return {**found, "unusable": error.what, "keys": {}}
    return found


def _diffusers_folder(path: Path, index: Found, registry: FamilyRegistry) -> Found:
    """Return the description of a diffusers folder and of each component that its index lists."""
    # read the index
    name = str(index.get("_class_name", ""))
    known = pipeline_of(name)
    families = [family for family in known.families if family != OTHER] if known is not None else []
    classes = {part: value[1] for part, value in index.items() if isinstance(value, list) and len(value) > 1}
    classes = {part: one_line(str(kind))[:MAX_SHOWN] for part, kind in classes.items() if kind is not None}
    # describe each component
    parts: dict[str, Found] = {}
    for part in classes:
        if (path / part / COMPONENT_CONFIG).is_file():
            try:
                parts[part] = _component(path / part, registry)
            except ModelError as error:
                parts[part] = {"title": error.what}
        elif not (path / part).is_dir():
            parts[part] = {"title": "not in this folder"}
    # decide which families can be trained on it
    trained = [family for family in families if family in registry]
    spec = registry[trained[0]] if trained else None
    why = "" if spec is None else _why_not(spec, parts, families)
    of_weights = () if spec is None else parts.get(spec.component, {}).get("families", ())
    alike = [family for family in families if family in of_weights] or families
    return {
        "title": f"{known.title if known is not None else UNKNOWN} ({name})",
        "families": alike,
        "trainable": [],
        "candidates": [family for family in trained if family in alike],
        **({"unusable": why} if why else {}),
        "components": classes,
        "parts": parts,
    }


def _why_not(spec: FamilySpec, parts: Mapping[str, Found], families: Sequence[str]) -> str:
    """Return why a diffusers folder cannot be trained; empty if it can.

    Args:
        spec: the first trainable family that fits the folder.
        parts: description of each component.
        families: all families that fit the folder.
    """
    main = spec.component
    if main not in parts:
        return f"the weights of its {main} are missing"
    for name in (main, *spec.text_components, *spec.model_section.part_keys):
        if "tensors" not in parts.get(name, {"tensors": 0}):
            return f"{name}: {parts[name]['title']}"
    if parts[main]["families"] and not set(families) & set(parts[main]["families"]):
        return f"the folder is mixed: its {main} is {parts[main]['title']}"
    return next((f"{name}: {part['unusable']}" for name, part in parts.items() if "unusable" in part), "")


def _given_instead(path: Path) -> str:
    """Return advice to use one of the models inside a folder, or another file, in place of the folder."""
    inside = path.glob(f"*/{INDEXES[0]}")
    near = sorted([*(file.parent for file in inside), *path.glob("*.safetensors")])[:MAX_NEAR]
    if near:
        return f"Give one of the models in it: {', '.join(map(str, near))}."
    return "Give a .safetensors file, a folder of diffusers or transformers, or a PEFT folder."


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _shipped(name: str, registry: FamilyRegistry) -> dict[str, object]:
    """Return the description of a built-in name such as builtin:tiny-sdxl.

    Raises:
        ModelError: the program ships nothing with this name.
    """
    from lora_rocm.dataset.sources.folders import BUILTIN_FOLDERS, BUILTIN_TABLES

    stem = name.removeprefix(BUILTIN)
    package = Path(str(resources.files("lora_rocm.builtin")))
    models = sorted(BUILTIN + folder.name.replace("_", "-") for folder in package.glob("tiny_*"))
    if name in models:
        families = [spec.name for spec in registry if stem == f"tiny-{spec.name}"]
        if (package / stem.replace("-", "_") / COMPONENT_CONFIG).is_file() and CAUSAL in registry:
            families = [CAUSAL]
        return {"title": "a tiny model that ships with the program", "families": families, "trainable": families}
    if name in (*BUILTIN_FOLDERS, *BUILTIN_TABLES):
        title = "data that ships with the program, for data.path or dataset"
        return {"title": title, "families": [], "trainable": [], "no_model": True}
    known = ", ".join((*models, *BUILTIN_FOLDERS, *BUILTIN_TABLES))
    raise ModelError("not-a-model", "Nothing of this name ships with the program.", where=name, fix=f"Known: {known}.")


def _model(header: TensorFileHeader, registry: FamilyRegistry) -> Found:
    model, found = model_of(header.shapes), models_in(header.shapes)
    families = [model.family] if model is not None and model.part in PARTS and model.family != OTHER else []
    usable = model is not None and model.part in BASES
    alone = FOLDER_ALONE if model is not None and model.part == LANGUAGE_MODEL else PART_ALONE
    parts = [each for each in found if each.part != "whole"]
    trained = [name for name in families if name in registry]
    return {
        "title": UNKNOWN_FILE if model is None else model.title,
        "families": families,
        "trainable": [],
        **({"unusable": alone} if trained and not usable else {}),
        **({"candidates": trained} if trained and usable else {}),
        "keys": {family: f"model.{key}" for family, key in (model.keys if model is not None else {}).items()},
        "components": {each.prefix or each.part: each.title for each in parts} if len(found) > 1 else {},
    }


def _adapter(header: TensorFileHeader, standard: TensorFileHeader, kind: str, registry: FamilyRegistry) -> Found:
    from lora_rocm.commands.adapter_verdict import has_fault, peft_config, refusals

    # recognise the families
    origin = origin_of(standard.tensors, standard.shapes)
    families = families_with(origin, header.metadata)
    titles = [registry[name].title for name in families if name in registry]
    of = titles[0] if len(families) == len(titles) == 1 else origin.title if origin is not None else ""
    trained = [name for name in families if name in registry]
    # decide whether a run can start from it
    notices = list[str]()
    refused = refusals(header, families, registry, notices.append)
    usable = [name for name in trained if name not in refused]
    others: Found = {}
    if trained and not usable:
        error = refused[trained[0]]
        problem = {"code": error.code, "what": error.what, "where": error.where, "fix": error.fix}
        others = {"unusable": error.what, "problem": problem}
    if trained and kind.removesuffix(" and trained norms") not in STARTERS:
        others = {"unusable": f"a run cannot start from a {kind.removesuffix(' and trained norms')}"}
    # find the programs that read it; a faulty file gets none
    spelling, ranks = spelling_of(header.tensors), ranks_of(standard)
    is_faulty = "unusable" in others and has_fault(refused)
    readers = None if is_faulty or any_rewritten(header.tensors) else readers_of_file(header, families)
    if trained and (foreign := foreign_name(standard.tensors, families)) is not None:
        name, other = foreign
        others = {
            "unusable": f"a run cannot start from a mixture: it contains {one_line(name)[:MAX_SHOWN]}, of {other.title}"
        }
        of, families, readers = f"{of} and {other.title}", (), None
    # describe its modules, ranks and alphas
    config = peft_config(header)
    alpha = _alphas(standard) if config is None else dict.fromkeys(("min", "max"), as_number(config.get("lora_alpha")))
    return {
        "title": f"{'an' if kind[0] in 'IO' else 'a'} {kind} for {of or UNKNOWN}",
        "families": list(families),
        "trainable": [] if others else usable,
        "notices": [] if others else [*dict.fromkeys(notices)],
        **others,
        "adapter": {
            "kind": kind,
            "spelling": spelling,
            "modules": _modules(standard),
            "ranks": {str(rank): count for rank, count in ranks.most_common()},
            "alpha": {"missing": 0, **alpha},
            "readers": None if readers is None else readers.by_program,
        },
    }


def _modules(header: TensorFileHeader) -> dict[str, dict[str, int]]:
    """Return the number of modules of each kind, by the component's name in the file."""
    counts: dict[str, Counter[str]] = {}
    for name in sorted({name.rpartition(".lora")[0] or name.rpartition(".")[0] for name in header.tensors}):
        start = re.match(r"(?:lora|lycoris)_[a-z]+\d?(?=_)|base_model\.model|[^.]+", name)
        place = BLOCK.fullmatch(name[:MAX_SHOWN])
        target = (place[1] or place[2]).replace(".", "_") if place is not None else name
        counts.setdefault(start[0] if start is not None else name, Counter())[target] += 1
    return {component: dict(found.most_common()) for component, found in sorted(counts.items())}


def _alphas(header: TensorFileHeader) -> Found:
    """Return the smallest and largest alpha, and the number of modules that have a rank but no alpha."""
    found = alphas_of(header).values()
    missing = max(0, ranks_of(header).total() - len(found))
    return {"min": min(found, default=None), "max": max(found, default=None), "missing": missing}


def _metadata(metadata: dict[str, str]) -> Found:
    found: Found = {name: metadata[name] for name in NOTED if metadata.get(name, "") not in EMPTY}
    try:
        folders = parse_json(metadata.get("ss_tag_frequency", "{}"))
        tags = Counter({tag: int(count) for folder in folders.values() for tag, count in folder.items()})
    except (ValueError, AttributeError, TypeError, RecursionError):  # text of another program, only for display
        return found
    if tags:
        found |= {"tags": len(tags), "frequent_tags": [tag for tag, _ in tags.most_common(MAX_NAMED)]}
    return found


def inspect_text(found: Found) -> str:
    """Return a description as text."""
    lines = [f"{found['path']}: {found['title']}", *_verdict_lines(found)]
    is_refused = "unusable" in found and not found["trainable"]
    if "dtypes" in found:
        dtypes = ", ".join(found["dtypes"])
        lines.append(f"  {count_text(found['tensors'], 'tensor')}, {size_text(found['bytes'])}, {dtypes or 'empty'}")
    if found.get("quantised"):
        lines.append(f"  quantised: {found['quantised']}")
    for name, title in found.get("components", {}).items():
        part = found.get("parts", {}).get(name)
        lines.append(f"  {name}: {title}{f', {_part_text(part)}' if part is not None else ''}")
    if "adapter" in found:
        lines += _adapter_lines(found["adapter"], is_refused=is_refused)
    for name, adapter in found.get("adapters", {}).items():
        lines += [f"  {name}", *(f"  {line}" for line in _adapter_lines(adapter, is_refused=is_refused))]
    for name, value in found.get("metadata", {}).items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        lines.append(f"  {name}: {one_line(text)[:MAX_SHOWN]}")
    return "\n".join(map(legible, lines))  # names and metadata of a file may contain line ends


def _verdict_lines(found: Found) -> list[str]:
    """Return lines about the possible uses of a file or folder, or about why there are none."""
    lines = list[str]()
    starts = "adapter" in found or "adapters" in found
    use = "can start a run (lora.init_from) with" if starts else "can be trained on with"
    if found["trainable"]:
        more = f", and with {', '.join(found['needed'])} set" if found.get("needed") else ""
        lines.append(f"  {use} model.family: {' or '.join(found['trainable'])}{more}")
    elif found["families"] or "unusable" in found:
        lines.append(f"  {found.get('unusable', NOT_TRAINED)}")
    if found["trainable"] and not starts and not found["path"].startswith(BUILTIN):
        lines.append(f"  {BASE_JUDGED_BY}")
    lines += [f"  note: {notice}" for notice in found.get("notices", ())]
    for key in sorted(set(found.get("keys", {}).values())):
        names = [name for name, each in found["keys"].items() if each == key]
        lines.append(f"  can be used as {key} with model.family: {' or '.join(names)}")
    return lines


def _part_text(part: Found) -> str:
    """Return one line about a component of a diffusers folder: its title, size and number formats."""
    if "tensors" not in part:
        return str(part["title"])
    size = f"{count_text(part['tensors'], 'tensor')}, {size_text(part['bytes'])}, {', '.join(part['dtypes'])}"
    quantised = f", quantised: {part['quantised']}" if part["quantised"] else ""
    known = "" if part["title"].startswith(UNKNOWN) else part["title"].partition(" (")[0] + ", "
    return f"{known}{size}{quantised}"


def _adapter_lines(adapter: Found, *, is_refused: bool) -> list[str]:
    """Return lines about the contents of an adapter file. ``is_refused``: omit the notes about other programs."""
    lines = []
    shown = dict(list(adapter["modules"].items())[:MAX_NAMED])
    for component, modules in shown.items():
        some = [f"{target} {count}" for target, count in list(modules.items())[:MAX_NAMED]]
        others = len(modules) - MAX_NAMED
        more = f" and {count_text(others, 'other kind')}" if others > 0 else ""
        lines.append(
            f"  {component[:MAX_SHOWN]}: {count_text(sum(modules.values()), 'module')} ({', '.join(some)}{more})"
        )
    if left := [modules for name, modules in adapter["modules"].items() if name not in shown]:
        count = sum(sum(modules.values()) for modules in left)
        lines.append(f"  and {count_text(len(left), 'other name')}: {count_text(count, 'module')}")
    if adapter["ranks"]:
        lines.append("  rank " + ", ".join(f"{rank} ({count})" for rank, count in adapter["ranks"].items()))
    alpha = adapter["alpha"]
    if alpha["min"] is not None:
        same = alpha["min"] == alpha["max"]
        both = number_text(alpha["min"]) if same else f"{number_text(alpha['min'])} to {number_text(alpha['max'])}"
        missing = f", missing in {count_text(alpha['missing'], 'module')}" if alpha["missing"] else ""
        lines.append(f"  alpha {both}{missing}")
    elif alpha["missing"] and not is_refused:
        lines.append("  no alpha: each program uses the rank, so the scale is 1")
    if adapter["readers"] is None:
        unknown = "  the programs that read it are unknown; for the files of a run, lora-rocm export lists them"
        return lines if is_refused else [*lines, unknown]
    return lines + [f"  {PROGRAMS[name]}: {text}" for name, text in adapter["readers"].items()]
