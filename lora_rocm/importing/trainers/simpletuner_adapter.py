"""Translates SimpleTuner's adapter: a LoRA of PEFT, or a network of LyCORIS with a separate file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.translator import Function, Translator
from lora_rocm.importing.value_maps import is_on, number, take_number, take_path, take_switch, whole

ATTENTION = r"attention\.(to_[qkv]|to_out\.0)"
Z_IMAGE_BLOCKS = r"(layers|noise_refiner|context_refiner)\.\d+\."
TARGETS: Mapping[str, Value] = {"z-image": [Z_IMAGE_BLOCKS + ATTENTION]}
"""Maps a family to the layers that a LoRA adapts, if they differ from the preset ``attention``."""
CLASSES: Mapping[tuple[str, bool], Value] = {
    ("z-image", False): [Z_IMAGE_BLOCKS + ATTENTION],
    ("z-image", True): [Z_IMAGE_BLOCKS + rf"({ATTENTION}|feed_forward\.w[123])"],
    ("flux", True): [r"transformer_blocks\.\d+\.(attn\..*|ff(_context)?\.net\.(0\.proj|2))", r"single_.*\.attn\..*"],
    ("sdxl", True): [r".*\.transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))"],
    ("anima", True): "attention-mlp",
}
"""Maps (family, whether the class FeedForward is adapted in addition to Attention) to the layers.

All other combinations use ``attention``.
"""
CONTEXT = r"attn\.(add_[qkv]_proj|to_add_out)"
FLUX_TARGETS: Mapping[str, Value] = {
    "all": "attention", "all+ffs": "attention-mlp", "ai-toolkit": "all-linear",
    "context": [rf"transformer_blocks\.\d+\.{CONTEXT}"],
    "context+ffs": [rf"transformer_blocks\.\d+\.({CONTEXT}|ff_context\.net\.(0\.proj|2))"],
    "tiny": [r"single_transformer_blocks\.(7|20)\.proj_out"], "nano": [r"single_transformer_blocks\.7\.proj_out"],
}  # fmt: skip
ALGORITHMS = {"lora": "lora", "locon": "lora", "lokr": "lokr", "loha": "loha", "diag-oft": "oft", "ia3": "ia3"}
INITS = {"default": "default", "true": "default", "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}
WHOLE = 2048
"""Highest rank in a recipe. It keeps the second matrix of a LoKr whole."""


def is_lycoris(t: Translator) -> bool:
    """Whether the adapter is a LyCORIS network. This is also the case if only a LyCORIS file is named."""
    kind = t.given("lora_type", "model_family", "model_type")
    if kind is None:
        return t.given("lycoris.algo") is not None
    return str(t.value("lora_type")).lower() == "lycoris"


def take_adapter(t: Translator, family: str) -> None:
    """Write the trainer's default adapted layers if the configuration names none."""
    modules, preset = t.given("peft_lora_target_modules"), t.given("lycoris.apply_preset.target_module")
    if is_lycoris(t):
        if preset is None:
            t.take("lora.targets", "attention-mlp", note="LyCORIS chooses its own layers if its file names none")
    elif (modules is None or not modules.value) and family != "flux":
        t.take("lora.targets", TARGETS.get(family, "attention"), note="SimpleTuner adapts attention layers only")


def _of_peft(function: Function) -> Function:
    """Return ``function`` restricted to PEFT's LoRA."""

    def take(t: Translator, setting: Setting) -> None:
        if is_lycoris(t):
            t.skip(setting, "LyCORIS' own file has it")
        else:
            function(t, setting)

    return take


def _kind(t: Translator, setting: Setting) -> None:
    plain = str(setting.value).lower()
    if plain == "standard":
        t.skip(setting, "a LoRA")
    elif plain == "lycoris":
        t.skip(setting, "LyCORIS' own file has the kind")
    else:
        t.lose(setting, "lora-rocm does not train this kind of adapter", ours="lora.type")


def _flux_targets(t: Translator, setting: Setting) -> None:
    """Translate the layers of FLUX.1. This function also runs for the default."""
    modules = t.given("peft_lora_target_modules")
    plain = str(setting.value).lower()
    if t.values["model.family"].value != "flux" or is_lycoris(t) or (modules is not None and modules.value):
        t.skip(setting, "another key chooses the layers")
    elif plain in FLUX_TARGETS:
        t.take("lora.targets", FLUX_TARGETS[plain], setting)
    elif plain == "all+ffs+embedder":
        t.take(
            "lora.targets", "attention-mlp", setting, note="SimpleTuner also adapts the layer that reads the latents"
        )
    else:
        t.lose(setting, "adapts other layers", ours="lora.targets")


def _target_modules(t: Translator, setting: Setting) -> None:
    """Translate names of modules. PEFT compares only the end of a name."""
    names = setting.value if isinstance(setting.value, list) else re.findall(r"[\w.]+", str(setting.value))
    if names and not str(setting.value).endswith(".json"):
        patterns: list[Value] = [rf"(.*\.)?{re.escape(str(name))}" for name in names]
        t.take(
            "lora.targets",
            patterns,
            setting,
            note="SimpleTuner compares the ends of names; in lora-rocm whole names count",
        )
    else:
        t.lose(setting, "names the layers that are adapted", ours="lora.targets")


def _text_encoder(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value):
        t.skip(setting, "text encoders are not trained by default")
    else:
        t.take("lora.train_text_encoder", True, setting)


def _text_encoder_rate(t: Translator, setting: Setting) -> None:
    if is_on(t.value("train_text_encoder")) and number(setting.value):
        take_number("optim.text_encoder_learning_rate")(t, setting)
    else:
        t.skip(setting, "no text encoder is trained")


def _dropout(t: Translator, setting: Setting) -> None:
    if number(setting.value) == 0:
        t.skip(setting, "0 switches it off")
    else:
        take_number("lora.dropout")(t, setting)


def _init(t: Translator, setting: Setting) -> None:
    own = INITS.get(str(setting.value).lower())
    if own == "default":
        t.skip(setting, "the usual start")
    elif own is None:
        t.lose(setting, "starts the adapter in another way", ours="lora.init")
    else:
        t.take("lora.init", own, setting)


def _formats(t: Translator, setting: Setting) -> None:
    own = {"diffusers": "diffusers", "comfyui": "comfyui"}.get(str(setting.value).lower())
    if is_lycoris(t):
        t.skip(setting, "files of LyCORIS have its own names")
    elif own is None:
        t.lose(setting, "lora-rocm writes no such file", ours="output.formats", changes_weights=False)
    else:
        t.take("output.formats", [own], setting)


# LyCORIS' own file


def _of_lycoris(function: Function) -> Function:
    """Return ``function`` restricted to LyCORIS networks, because SimpleTuner reads the LyCORIS file only for these."""

    def take(t: Translator, setting: Setting) -> None:
        if is_lycoris(t):
            function(t, setting)
        else:
            t.skip(setting, "lora_type is standard, so LyCORIS' file is not read")

    return take


def _algorithm(t: Translator, setting: Setting) -> None:
    own = ALGORITHMS.get(str(setting.value).lower())
    if own is None:
        t.lose(setting, "lora-rocm does not train this kind of adapter; a LoRA is written", ours="lora.type")
    else:
        t.take("lora.type", own, setting)


def _is_whole(t: Translator) -> bool:
    rank = number(t.value("lycoris.linear_dim"))
    return is_on(t.value("lycoris.full_matrix")) or (rank is not None and rank > WHOLE)


def _rank(t: Translator, setting: Setting) -> None:
    if _is_whole(t):
        t.take("lora.rank", WHOLE, setting, note="the highest rank in lora-rocm: the second matrix is whole")
    else:
        take_number("lora.rank")(t, setting)


def _full_matrix(t: Translator, setting: Setting) -> None:
    if not is_on(setting.value):
        t.skip(setting, "it is off")
    elif str(t.value("lycoris.algo")).lower() == "lokr":
        t.take("lora.rank", WHOLE, setting, note="the highest rank in lora-rocm: the second matrix is whole")
    else:
        t.lose(setting, "trains whole matrices", ours="lora.rank")


def _alpha(t: Translator, setting: Setting) -> None:
    if _is_whole(t) and str(t.value("lycoris.algo")).lower() == "lokr":
        t.skip(setting, "a LoKr of whole matrices has no alpha")
    else:
        take_number("lora.alpha")(t, setting)


def _targets(t: Translator, setting: Setting) -> None:
    """Translate classes of modules; the layers in these modules are adapted."""
    names = {str(each) for each in (setting.value if isinstance(setting.value, list) else [setting.value])}
    family = str(t.values["model.family"].value)
    if not names or not names <= {"Attention", "FeedForward"}:
        t.lose(setting, "names classes of modules; write lora.targets", ours="lora.targets")
        return
    if names == {"FeedForward"}:
        t.lose(setting, "adapts the feed-forward layers alone; write lora.targets", ours="lora.targets")
        return
    key = (family if family not in ("sd15", "sd2") else "sdxl", len(names) == 2)
    t.take("lora.targets", CLASSES.get(key, "attention"), setting)


def take_factors_of_classes(t: Translator) -> None:
    """Translate ``module_algo_map``: separate values for some classes.

    Values equal to the general ones have no effect.
    """
    prefix = "lycoris.apply_preset.module_algo_map."
    for setting in t.below("lycoris"):
        if not setting.key.startswith(prefix) or t.is_settled(setting):
            continue
        name = setting.key.rpartition(".")[2]
        if setting.value == t.value(f"lycoris.{name}"):
            t.skip(setting, "it is the general value")
        else:
            t.lose(setting, "is another value for this class of modules", ours=f"lora.{name}")


def _factor(t: Translator, setting: Setting) -> None:
    if str(t.value("lycoris.algo")).lower() == "lokr":
        take_number("lora.factor")(t, setting)
    else:
        t.skip(setting, "only LoKr reads it")


def _share(ours: str) -> Function:
    def take(t: Translator, setting: Setting) -> None:
        found = number(setting.value)
        if not found:
            t.skip(setting, "0 switches it off")
        else:
            t.take(ours, whole(found), setting)

    return take


ADAPTER_FUNCTIONS: Mapping[str, Function] = {
    "kind": _kind,
    "rank": _of_peft(take_number("lora.rank")),
    "alpha": _of_peft(take_number("lora.alpha")),
    "dropout": _of_peft(_dropout),
    "dora": _of_peft(take_switch("lora.use_dora")),
    "init": _of_peft(_init),
    "start": take_path("lora.init_from"),
    "formats": _formats,
    "flux_targets": _flux_targets,
    "target_modules": _of_peft(_target_modules),
    "text_encoder": _text_encoder,
    "text_encoder_rate": _text_encoder_rate,
    "algo": _of_lycoris(_algorithm),
    "lycoris_rank": _of_lycoris(_rank),
    "lycoris_alpha": _of_lycoris(_alpha),
    "full_matrix": _of_lycoris(_full_matrix),
    "factor": _of_lycoris(_factor),
    "decompose_both": _of_lycoris(take_switch("lora.decompose_both")),
    "lycoris_dropout": _of_lycoris(_share("lora.dropout")),
    "rank_dropout": _of_lycoris(_share("lora.rank_dropout")),
    "module_dropout": _of_lycoris(_share("lora.module_dropout")),
    "constraint": _of_lycoris(take_number("lora.constraint")),
    "lycoris_targets": _of_lycoris(_targets),
}
