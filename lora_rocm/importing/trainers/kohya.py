"""Imports kohya's sd-scripts: configurations in TOML, dataset files, command lines, and JSON files of its GUI.

LoRA_Easy_Training_Scripts, which has the same names in sections, is supported, too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.formats.command_line import NO_LINES, command_settings, options_of, shell_of
from lora_rocm.importing.prompts import take_prompts
from lora_rocm.importing.rank_of_file import take_rank_of_file, unless_of_file
from lora_rocm.importing.setting import FileContent, Setting, UnreadText
from lora_rocm.importing.trainer import PeerTrainer
from lora_rocm.importing.trainers import kohya_network, kohya_run
from lora_rocm.importing.trainers.kohya_data import side_of, take_data
from lora_rocm.importing.trainers.kohya_schedule import take_schedule
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, take_number, take_number_format, take_path, take_switch

PROGRAM = re.compile(r"(?:^|[\\/\s\"'])(\w*train_network\.py)(?=$|[\s\"'`^])")
FAMILY_OF_SCRIPT = {
    "sdxl_train_network.py": "sdxl", "flux_train_network.py": "flux", "anima_train_network.py": "anima",
    "train_network.py": "sd",
}  # fmt: skip
FAMILY_OF_MODULE = {"networks.lora_flux": "flux", "networks.oft_flux": "flux", "networks.lora_anima": "anima"}
FAMILY_OF_SWITCH = {"sdxl": "sdxl", "flux1_checkbox": "flux", "anima_checkbox": "anima"}
FAMILY_OF_PART = {"qwen3": "anima", "anima_qwen3": "anima", "clip_l": "flux", "t5xxl": "flux", "ae": "flux"}
OTHERS = {
    "networks.lora_sd3": "Stable Diffusion 3", "sd3_train_network.py": "Stable Diffusion 3",
    "sd3_checkbox": "Stable Diffusion 3",
    "networks.lora_lumina": "Lumina Image 2", "lumina_train_network.py": "Lumina Image 2",
    "lumina_checkbox": "Lumina Image 2", "gemma2": "Lumina Image 2",
    "networks.lora_hunyuan_image": "HunyuanImage-2.1", "hunyuan_image_train_network.py": "HunyuanImage-2.1",
    "hunyuan_image_checkbox": "HunyuanImage-2.1", "byt5": "HunyuanImage-2.1",
}  # fmt: skip
OF_XL = re.compile(r"xl|pony|illustrious|noob|animagine", re.IGNORECASE)
OF_NAME = {"flux": re.compile(r"flux(?![._-]?2)", re.IGNORECASE), "anima": re.compile(r"\banima(?!g)", re.IGNORECASE)}
FLUX_VARIANT = re.compile(r"schnell|kontext", re.IGNORECASE)
LISTS = ("network_args", "optimizer_args", "lr_scheduler_args")
OF_OTHER_FAMILIES = re.compile(r"(?:sd3|hunyuan(?:_image)?|lumina|flux1|anima|sdxl)_")


def _read(files: ConfigFiles, options: Sequence[str]) -> FileContent:
    """Return all settings with flat names. Names of sections are ignored, as in the scripts' own parser."""
    found = FileContent()
    for each in files.given:
        content = _settings_of(each)
        for setting in [each for each in content.settings if each.key == "config_file" and each.value]:
            if (other := files.named_by(_with_suffix(setting))) is not None:  # the command line takes precedence
                found.extend(_settings_of(other))
        found.extend(content)
        found.extend(_additional(content.settings))
    found.extend(options_of([*options], "command line", NO_LINES))
    for setting in [each for each in found.settings if each.key == "dataset_config" and each.value]:
        if (other := files.named_by(setting)) is not None and other.path not in [each.path for each in files.given]:
            found.extend(_settings_of(other))
    return found.with_settings([part for setting in found.settings for part in _parts(setting)])


def _with_suffix(setting: Setting) -> Setting:
    """Return the setting with the suffix of a configuration file added.

    The scripts accept its name without the suffix.
    """
    text = str(setting.value)
    text = text if text.lower().endswith((".toml", ".json")) else f"{text}.toml"
    return Setting(setting.key, text, setting.file, setting.line)


def _additional(settings: Sequence[Setting]) -> FileContent:
    """Return the options in the GUI's field for additional options."""
    found = FileContent()
    for setting in settings:
        if setting.key != "additional_parameters" or not isinstance(setting.value, str):
            continue
        try:
            words = shlex.split(setting.value)
        except ValueError:  # an open quotation mark
            words = setting.value.replace('"', "").split()
        content = options_of(words, setting.file, NO_LINES)
        found.settings += [Setting(each.key, each.value, setting.file, setting.line) for each in content.settings]
        found.unread += [UnreadText(each.file, setting.line, each.why) for each in content.unread]
        found.secrets += content.secrets
    return found


def _settings_of(file: ConfigFile) -> FileContent:
    shell = shell_of(file.path)
    if shell is not None or (file.path.suffix.lower() not in SUFFIXES and PROGRAM.search(file.text)):
        found = command_settings(file.text, file.file, PROGRAM, shell or "sh")
        lines = (line for line in enumerate(file.text.splitlines(), 1) if not COMMENT.match(line[1]))
        for number, line in lines:
            if (script := PROGRAM.search(line)) is not None:
                found.settings.append(Setting("script", script[1], file.file, number))
                break
        return found
    content = file.settings()
    has_subsets = any(re.match(r"(?:datasets|subsets)\[", each.key, re.IGNORECASE) for each in content.settings)
    return content.with_settings([_flat(each, has_subsets=has_subsets) for each in content.settings])


SUFFIXES = (".toml", ".json", ".yaml", ".yml")
COMMENT = re.compile(r"^\s*(?:#|@?rem\b|::)", re.IGNORECASE)


def _flat(setting: Setting, *, has_subsets: bool) -> Setting:
    """Return a setting without its sections, which the scripts ignore. Datasets and arguments keep their sections."""
    parts = setting.key.split(".")
    first = parts[0].partition("[")[0].lower()
    key = parts[-1]
    if first in ("datasets", "subsets") or (first == "general" and has_subsets):
        key = setting.key
    elif len(parts) > 1 and parts[-2] in LISTS:
        key = f"{parts[-2]}.{parts[-1]}" if parts[-1] != "args" else parts[-2]
    return Setting(key, setting.value, setting.file, setting.line)


def _parts(setting: Setting) -> Iterator[Setting]:
    """Yield the setting itself or, for a list of ``name=value``, one setting for each name."""
    if setting.key not in LISTS:
        yield setting
        return
    value = setting.value
    words = value if isinstance(value, list) else WORD.findall(str(value).replace('"', "")) if value else []
    if not words:
        yield setting
    for word in words:
        name, equals, text = str(word).partition("=")
        if equals:
            yield Setting(f"{setting.key}.{name.strip()}", text.strip(), setting.file, setting.line)
        else:
            yield Setting(setting.key, str(word), setting.file, setting.line)


WORD = re.compile(r"\w+\s*=\s*(?:\[[^\]]*\]|\([^)]*\)|\S+)|\S+")


def _prepare(t: Translator) -> None:
    """Translate everything that depends on several keys: family, adapter, length, rates, optimizer, data."""
    _take_family(t)
    family = str(t.values["model.family"].value)
    is_gui = t.given("lora_type", "max_resolution", "model_list") is not None
    if is_gui:
        _prepare_gui(t, family)
    if family in kohya_run.FLOW:
        kohya_run.skip_unread_by_flow(t)
        kohya_run.take_flow(t, family)
    kohya_network.take_adapter(t)
    kohya_run.take_length(t, is_gui=is_gui)
    kohya_run.take_rates(t, family, is_gui=is_gui)
    kohya_run.take_optimizer(t)
    take_schedule(t)
    kohya_run.take_saving(t)
    kohya_run.take_file_format(t)
    take_data(t, 16 if family in kohya_run.FLOW else 8)
    adapter = t.given("network_module", "network_dim", "network_alpha", "network_args.algo", "lora_type", "script")
    base = t.given("pretrained_model_name_or_path", "train_data_dir")
    if adapter is None and base is not None:
        why = "the file names no network_module: its script may train all weights; the recipe trains a LoRA"
        t.unread.append(UnreadText(base.file, base.line, why))


def _take_family(t: Translator) -> None:
    """Translate the family.

    It is determined by the script, the network module, the GUI's switches or the base's components, or else guessed.
    """
    _refuse_others(t)
    module, script, version = t.given("network_module"), t.given("script"), t.given("v2")
    of_sd = "sd2" if version is not None and is_on(version.value) else "sd15"
    on = next((each for key in FAMILY_OF_SWITCH if (each := t.given(key)) is not None and is_on(each.value)), None)
    part = next((key for key in FAMILY_OF_PART if (each := t.given(key)) is not None and each.value), None)
    name, setting = "", None
    if script is not None and str(script.value) in FAMILY_OF_SCRIPT:
        name, setting = FAMILY_OF_SCRIPT[str(script.value)], script
    elif module is not None and str(module.value) in FAMILY_OF_MODULE:
        name = FAMILY_OF_MODULE[str(module.value)]
    elif on is not None:
        name, setting = FAMILY_OF_SWITCH[on.key], on
    elif t.given("sdxl", "lora_type", "max_resolution") is not None or of_sd == "sd2":
        name, setting = "sd", version
    elif part is not None:
        name = FAMILY_OF_PART[part]
    if name:
        t.take("model.family", of_sd if name == "sd" else name, *(() if setting is None else (setting,)))
    else:
        t.take("model.family", _guess(t), note="a guess, because no script is named: sdxl, sd15, sd2, flux or anima")
    base = t.given("pretrained_model_name_or_path")
    variant = FLUX_VARIANT.search(str(base.value)) if base is not None else None
    if variant is not None and t.values["model.family"].value == "flux":
        t.take("model.variant", variant[0].lower(), note="the name of the base has it")


def _refuse_others(t: Translator) -> None:
    """Stop if the script, a module or a component names a base model that lora-rocm does not train."""
    for setting in (t.given("network_module"), t.given("script")):
        if setting is not None and str(setting.value) in OTHERS:
            t.refuse_base(OTHERS[str(setting.value)], setting)
    for name in (name for name in OTHERS if "." not in name):
        setting = t.given(name)
        if setting is not None and (is_on(setting.value) if name.endswith("checkbox") else bool(setting.value)):
            t.refuse_base(OTHERS[name], setting)
    kind = t.given("model_type")
    if kind is not None and str(kind.value).lower() == "chroma":
        t.refuse_base("Chroma", kind)


def _guess(t: Translator) -> str:
    base = t.given("pretrained_model_name_or_path")
    name = str(base.value) if base is not None else ""
    for family, pattern in OF_NAME.items():
        if pattern.search(name):
            return family
    side = max([side_of(each.value) or 0 for each in t.settings if each.key.endswith("resolution")], default=0)
    return "sdxl" if side >= 768 or OF_XL.search(name) else "sd15"


def _prepare_gui(t: Translator, family: str) -> None:
    """Set the outcome of the GUI's fields that this kind of run does not read. For many fields, 0 means off."""
    # fields of other families
    own = {"flux": ("flux1_",), "anima": ("anima_",), "sdxl": ("sdxl_",)}.get(family, ())
    for setting in t.settings:
        name = setting.key.lower()
        if OF_OTHER_FAMILIES.match(name) and not name.startswith(own or "-"):
            t.skip(setting, "a field for another base")
        elif name in ONLY_FLUX and family != "flux":
            t.skip(setting, "a field for another base")
        elif name in OF_SD3:
            t.skip(setting, "a field for Stable Diffusion 3")
        elif name in ZERO_IS_OFF and _is_zero(setting):
            t.skip(setting, "0 switches it off")
    # noise: one of two kinds
    kind = t.given("noise_offset_type")
    if kind is not None:
        off = ORIGINAL if str(kind.value) == "Multires" else MULTIRES
        for setting in t.settings:
            if setting.key.lower() in off:
                t.skip(setting, f"noise_offset_type is {kind.shown}")


def _is_zero(setting: Setting) -> bool:
    return str(setting.value).strip() in ("0", "0.0")


ORIGINAL = ("noise_offset", "adaptive_noise_scale", "noise_offset_random_strength")
MULTIRES = ("multires_noise_iterations", "multires_noise_discount")
ONLY_FLUX = (
    "ae", "clip_l", "t5xxl", "discrete_flow_shift", "model_prediction_type", "timestep_sampling", "guidance_scale",
    "t5xxl_max_token_length", "apply_t5_attn_mask", "mem_eff_save", "blocks_to_swap", "single_blocks_to_swap",
    "double_blocks_to_swap", "cpu_offload_checkpointing", "split_mode", "model_type", "fp8_base_unet",
)  # fmt: skip
OF_SD3 = (
    "clip_g", "clip_g_dropout_rate", "clip_l_dropout_rate", "logit_mean", "logit_std", "mode_scale",
    "pos_emb_random_crop_rate", "save_clip", "save_t5xxl", "t5xxl_device", "t5xxl_dtype", "weighting_scheme",
)  # fmt: skip
ZERO_IS_OFF = (
    "adaptive_noise_scale", "clip_skip", "ip_noise_gamma", "max_timestep", "max_train_epochs", "max_train_steps",
    "min_snr_gamma", "min_timestep", "multires_noise_iterations", "noise_offset", "sample_every_n_epochs",
    "sample_every_n_steps", "save_every_n_epochs", "save_every_n_steps", "save_last_n_epochs", "save_last_n_steps",
    "save_last_n_epochs_state", "save_last_n_steps_state", "seed", "vae_batch_size", "v_pred_like_loss", "t5xxl_lr",
    "scale_weight_norms", "network_dropout", "lr_warmup", "lr_warmup_steps", "blocks_to_swap",
)  # fmt: skip


def _finish(t: Translator) -> None:
    """Write kohya's sampler for previews, if there are prompts."""
    if "sample.prompts" not in t.values:
        for key in ("sample.sampler", "sample.every_n_steps", "sample.every_n_epochs"):
            t.withdraw(key, "there are no prompts", is_lost=False)


FUNCTIONS: Mapping[str, Function] = {
    "rank": unless_of_file(kohya_network.rank),
    "rank_of_file": take_rank_of_file,
    "alpha": unless_of_file(kohya_network.alpha),
    "convolution": kohya_network.convolution,
    "dora": kohya_network.dora,
    "loraplus": kohya_network.loraplus,
    "constraint": kohya_network.constraint,
    "dropout": kohya_network.dropout,
    "blocks": kohya_network.blocks,
    "loss": kohya_run.loss,
    "huber": kohya_run.huber,
    "prediction": kohya_run.prediction,
    "bf16_weights": kohya_run.bf16_weights,
    "base_in_8_bits": kohya_run.base_in_8_bits,
    "trackers": kohya_run.trackers,
    "sampler": kohya_run.sampler,
    "previews": kohya_run.previews,
    "clip_skip": kohya_run.clip_skip,
    "token_length": kohya_run.token_length,
    "base_weights": kohya_run.base_weights,
    "positive": kohya_run.positive,
    "validation": kohya_run.validation,
    "seed": kohya_run.seed,
    "text": kohya_run.text,
    "prompts": take_prompts,
    "accumulation": take_number("train.gradient_accumulation_steps"),
    "grad_norm": take_number("optim.max_grad_norm"),
    "base": take_path("model.name_or_path"),
    "vae": take_path("model.vae"),
    "text_encoder": take_path("model.text_encoder"),
    "text_encoder_2": take_path("model.text_encoder_2"),
    "t5_tokenizer": take_path("model.t5_tokenizer"),
    "start": take_path("lora.init_from"),
    "folder_of_runs": take_path("output.dir"),
    "precision": take_number_format("train.mixed_precision"),
    "file_format": take_number_format("output.dtype"),
    "checkpointing": take_switch("train.gradient_checkpointing"),
    "switch": kohya_run.switch,
}

TRAINER = PeerTrainer("kohya", _read, FUNCTIONS, _prepare, _finish)
