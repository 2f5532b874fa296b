"""Checks whether a base belongs to a UNet family and can be trained on, using only configs and headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler

from lora_rocm.base_models.config_faults import UNFIT_ERRORS, cause_of
from lora_rocm.base_models.loading import BaseSource
from lora_rocm.base_models.meta_components import defaults_of
from lora_rocm.errors import ModelError
from lora_rocm.families.common.component_check import MAX_NAMED, check_component
from lora_rocm.families.common.unet import inpainting
from lora_rocm.families.common.unet.original_names import unused_tensors
from lora_rocm.families.common.unet.sampling import scheduler_of
from lora_rocm.families.common.wrong_family import recognised_folder, wrong_family
from lora_rocm.families.objectives import ddpm
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.foundation.quiet import EVERYTHING
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, Config, read_config
from lora_rocm.model_files.header import PICKLE_SUFFIXES, TensorFileHeader
from lora_rocm.model_files.models import PARTS, model_of, models_in, pipeline_of
from lora_rocm.model_files.recognise_adapter import kind_of

UNET_PREFIX = "model.diffusion_model."
MAX_TIMESTEPS = 100_000
SPACINGS = ("linspace", "leading", "trailing")
FIX = "Use {} base model or one of its fine-tunes: a diffusers folder, a .safetensors checkpoint or a hub id."
REFINER = "an SDXL refiner, which cannot generate images alone"
TEXT_KEYS = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight"
NO_TEXT = "a UNet alone, without text encoders and VAE"


@dataclass(frozen=True)
class Expected:
    """Properties by which a family's models are recognised.

    title: name of the family in messages.
    with_article: the title with its article.
    family: value of ``model.family``.
    has_sizes: whether the UNet is conditioned on sizes and pooled text (SDXL).
    width: width of the text states that the UNet's attention reads.
    """

    title: str
    with_article: str
    family: str
    has_sizes: bool
    width: int

    @property
    def fix(self) -> str:
        return FIX.format(self.with_article)


def check(source: BaseSource, expected: Expected, registry: FamilyRegistry) -> tuple[str, ...]:
    """Refuse a model of another family or one that cannot be trained on. Returns notices about an accepted model.

    Raises:
        ModelError: wrong-family, not-a-model, incomplete-model, weights-unfit, weights-unknown, weights-quantised or
            config-absurd, or a config or header cannot be read.
    """
    if source.single_header is not None:
        _check_single(source, expected, registry, source.single_header)
    else:
        _check_folder(source, expected, registry)
    _check_unet(source, expected, registry, source.config("unet"))
    if "vae" in source.own:
        _check_vae(source, expected, registry)
    said = [check_component(source, name, expected.fix) for name in source.layout.parts]
    if source.single_header is not None:
        said.append(_unused_notice(source, source.single_header))
    return tuple(filter(None, said))


def _unused_notice(source: BaseSource, header: TensorFileHeader) -> str:
    """Return a notice about tensors of a checkpoint that no component uses, or an empty string."""
    others = unused_tensors(header, [part.prefix for part in source.layout.parts.values()])
    named = ", ".join(printable(key)[:100] for key in others[:MAX_NAMED])
    return f"The base has tensors that are not used ({len(others)}): {named}." if others else ""


def check_scheduler(source: BaseSource, config: Mapping[str, Any], samplers: Collection[str]) -> None:
    """Refuse a noise schedule or prediction type that is not supported.

    Args:
        source: the base.
        config: the base's scheduler config, with the recipe's choices applied.
        samplers: samplers of the previews, with schedulers that are built from ``config``.

    Raises:
        ModelError: prediction-unknown, scheduler-unreadable.
    """
    path, prediction = source.config_path("scheduler"), config["prediction_type"]
    if prediction not in ddpm.PREDICTION_TYPES:
        raise ModelError(
            "prediction-unknown",
            f"The base has the prediction type {printable(str(prediction))[:40]!r}. Supported types are "
            f"{' and '.join(ddpm.PREDICTION_TYPES)}.",
            where=f"{path}: prediction_type",
            fix="Use another base, or set model.prediction_type if you know that the file is wrong.",
        )
    try:
        _make_schedules(config, samplers)
    except (*UNFIT_ERRORS, ImportError) as error:  # beta sigmas need scipy
        key = cause_of(config, defaults_of(DDPMScheduler), error, lambda changed: _make_schedules(changed, samplers))
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            "scheduler-unreadable",
            f"The noise schedule of the base cannot be computed: {printable(first_line)[:200].rstrip('.')}.",
            where=f"{path}: {key}" if key else str(path),
            fix=DOWNLOAD_AGAIN,
        ) from error


def _make_schedules(config: Mapping[str, Any], samplers: Collection[str]) -> None:
    """Compute the noise schedules of training and previews. Raises one of ``UNFIT_ERRORS`` if that fails."""
    zero_snr = config.get("rescale_betas_zero_snr", False)
    if not 1 < config.get("num_train_timesteps", 1000) <= MAX_TIMESTEPS:
        raise ValueError(
            f"num_train_timesteps is {config['num_train_timesteps']}, but has to be between 2 and {MAX_TIMESTEPS}"
        )
    if not isinstance(zero_snr, bool):
        raise ValueError("rescale_betas_zero_snr is neither true nor false")
    levels_T = ddpm.noise_schedule(config, "epsilon", zero_snr).alphas_cumprod_T
    if len(levels_T) != config.get("num_train_timesteps", 1000):
        raise ValueError(f"trained_betas has {len(levels_T)} numbers, but num_train_timesteps is different")
    if not (torch.isfinite(levels_T).all() and levels_T.min() >= 0 and levels_T.max() <= 1):
        raise ValueError("its signal levels are not between 0 and 1")
    if config.get("timestep_spacing", SPACINGS[0]) not in SPACINGS:  # used by previews
        raise ValueError(
            f"timestep_spacing is {config['timestep_spacing']}, but has to be one of {', '.join(SPACINGS)}"
        )
    with EVERYTHING:  # diffusers passes tensors to numpy
        for sampler in samplers:
            scheduler_of({**config, "rescale_betas_zero_snr": zero_snr}, sampler).set_timesteps(2)


def _check_folder(source: BaseSource, expected: Expected, registry: FamilyRegistry) -> None:
    index_path = source.folder / "model_index.json"
    if not index_path.is_file():
        found = recognised_folder(source.folder)
        if found is not None and expected.family not in found.families:
            raise _wrong(source, expected, registry, found.title, found.families)
        raise _not_a_model(source)
    # The pipeline: another family, or a refiner.
    index = read_config(index_path)
    kind = str(index.get("_class_name", ""))
    known = pipeline_of(kind)
    is_own = known is not None and expected.family in known.families
    if "transformer" in index or (known is not None and not is_own):
        what = known.title if known and not is_own else f"a model for {printable(kind)[:80]}"
        raise _wrong(source, expected, registry, what, known.families if known and not is_own else ())
    if not _is_listed(index, "text_encoder") and _is_listed(index, "text_encoder_2"):
        raise _wrong(source, expected, registry, REFINER)
    # The components: all there, and readable.
    missing = [name for name in source.layout.parts if not (source.folder / name).is_dir()]
    if missing and not is_own:
        raise _wrong(source, expected, registry, f"a model for {kind}" if kind else "an unknown pipeline")
    if missing:
        raise ModelError(
            "incomplete-model",
            f"The model folder lacks {', '.join(missing)}.",
            where=f"model.name_or_path: {source.name}",
            fix="Download the whole model.",
        )
    for name in source.layout.parts:
        source.weights(name)  # refuses pickles and damaged files


def _is_listed(index: Mapping[str, Any], name: str) -> bool:
    """Whether a pipeline's index lists a component: as [library, class], and not as [null, null]."""
    entry = index.get(name)
    return isinstance(entry, list) and bool(entry) and entry[0] is not None


def _check_single(source: BaseSource, expected: Expected, registry: FamilyRegistry, header: TensorFileHeader) -> None:
    adapter, found = kind_of(header.tensors), models_in(header.shapes)
    if adapter:
        raise _wrong(source, expected, registry, f"a {adapter} file, not a base model")
    other = next((each for each in found if each.part in PARTS and each.family != expected.family), None)
    if other is not None:
        raise _wrong(source, expected, registry, other.title, [other.family])
    if not any(each.part == "whole" for each in found):
        if _has(header, UNET_PREFIX):
            raise _incomplete(source, "text encoders")
        if not found:
            raise _wrong(source, expected, registry, "an unknown checkpoint")
        raise _wrong(source, expected, registry, NO_TEXT if found[0].part == "unet" else found[0].title)
    channels = header.shape(f"{UNET_PREFIX}input_blocks.0.0.weight")
    if channels is None:
        raise _incomplete(source, "UNet")
    _check_channels(source, expected, registry, channels[1])
    if "vae" not in source.own and not _has(header, source.layout.parts["vae"].prefix):
        raise _incomplete(source, "VAE, and model.vae is not set")


def _has(header: TensorFileHeader, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in header.tensors)


def _check_unet(source: BaseSource, expected: Expected, registry: FamilyRegistry, config: Config) -> None:
    values = config.values
    addition, width = values.get("addition_embed_type"), values.get("cross_attention_dim")
    if expected.has_sizes and addition != "text_time":
        what = "a UNet without SDXL's text and time conditioning (Stable Diffusion 1.x or 2.x has none)"
        raise _wrong(source, expected, registry, what)
    if not expected.has_sizes and addition is not None:
        raise _wrong(source, expected, registry, "an SDXL model, or another model conditioned on more than text")
    if isinstance(width, int) and width != expected.width:
        other = model_of({TEXT_KEYS: (width, width)})
        if other is not None:
            raise _wrong(source, expected, registry, other.title, [other.family])
    _check_channels(source, expected, registry, config.whole("in_channels", 4))
    if (given := config.whole("out_channels", 4)) != 4:
        raise _wrong(
            source, expected, registry, f"a UNet with {given} output channels instead of the 4 of {expected.title}"
        )


def _check_channels(source: BaseSource, expected: Expected, registry: FamilyRegistry, channels: object) -> None:
    if channels not in (4, inpainting.CHANNELS):
        takes = f"has 4, or {inpainting.CHANNELS} for inpainting"
        raise _wrong(
            source, expected, registry, f"a UNet with {channels} input channels, while {expected.title} {takes}"
        )


def _check_vae(source: BaseSource, expected: Expected, registry: FamilyRegistry) -> None:
    (headers, _), config = source.weights("vae"), source.config("vae")
    latents = [
        shape[1] for h in headers for n in h.tensors if n.endswith("decoder.conv_in.weight") and (shape := h.shape(n))
    ]
    base = source.folder / "vae" / "config.json"
    scale = Config(read_config(base), base).number("scaling_factor", 0.18215)
    if latents != [4] or config.number("scaling_factor", 0.18215) != scale:
        raise ModelError(
            "wrong-family",
            f"This is not a VAE of {expected.title}.",
            where=f"model.vae: {source.own['vae']}",
            fix=f"Remove model.vae, or set it to a VAE of {expected.title}.",
        )


def _not_a_model(source: BaseSource) -> ModelError:
    files = sorted(path.name for path in source.folder.glob("*.safetensors"))
    if (source.folder.parent / "model_index.json").is_file():
        fix = f"Use the folder of the whole model: model.name_or_path: {source.folder.parent}"
    elif files:
        fix = f"Use the file itself: model.name_or_path: {source.folder / files[0]}"
    else:
        pickles = [path.name for suffix in PICKLE_SUFFIXES for path in source.folder.glob(f"*{suffix}")]
        if pickles:
            return ModelError(
                "pickle-refused",
                f"This folder has only pickle files ({pickles[0]}). They are not read, because reading a "
                "pickle file can run any program.",
                where=f"model.name_or_path: {source.name}",
                fix="Use the .safetensors version of the model.",
            )
        fix = "Set model.name_or_path to the folder that contains model_index.json."
    what, where = "This folder is not a diffusers model.", f"model.name_or_path: {source.name}"
    return ModelError("not-a-model", what, where=where, fix=fix)


def _wrong(
    source: BaseSource, expected: Expected, registry: FamilyRegistry, what: str, families: Sequence[str] = ()
) -> ModelError:
    return wrong_family(source.name, what, expected.title, families, expected.fix, registry)


def _incomplete(source: BaseSource, what: str) -> ModelError:
    return ModelError(
        "incomplete-model",
        f"This checkpoint has no {what}.",
        where=f"model.name_or_path: {source.name}",
        fix="Use the full checkpoint.",
    )
