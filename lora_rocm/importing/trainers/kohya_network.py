"""Translates the adapter of kohya's scripts: network module, its arguments, the GUI's kinds, and values per block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lora_rocm.importing.setting import Setting, Value, path_text
from lora_rocm.importing.translator import RecipeValue, Translator
from lora_rocm.importing.value_maps import is_on, number, whole

LYCORIS = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "diag-oft": "oft", "ia3": "ia3"}
MODULES = {
    "networks.lora": "lora", "networks.lora_flux": "lora", "networks.lora_anima": "lora",
    "networks.loha": "loha", "networks.lokr": "lokr",
}  # fmt: skip
NAMES = {
    "full": "all weights", "glora": "a GLoRA", "dylora": "a DyLoRA", "boft": "a BOFT", "abba": "an ABBA",
    "networks.lora_fa": "B alone (LoRA-FA)", "lora-fa": "B alone (LoRA-FA)",
    "networks.dylora": "a DyLoRA", "networks.oft": "an OFT of blocks with one size", "networks.oft_flux": "an OFT",
    "kohya dylora": "a DyLoRA", "lycoris/dylora": "a DyLoRA", "lycoris/glora": "a GLoRA", "lycoris/boft": "a BOFT",
    "lycoris/native fine-tuning": "all weights", "flux1 oft": "an OFT",
}  # fmt: skip
"""Maps kinds of adapters that lora-rocm does not train to descriptions."""
GUI_KINDS = {
    "standard": "lora", "kohya locon": "lora", "locon": "lora", "flux1": "lora", "anima": "lora",
    "lycoris/locon": "lora", "lycoris/loha": "loha", "lycoris/lokr": "lokr", "lycoris/ia3": "ia3",
    "lycoris/diag-oft": "oft", "kohya loha": "loha", "kohya lokr": "lokr",
}  # fmt: skip
BLOCKS = {
    "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold", "block_dims", "block_alphas",
    "conv_block_dims", "conv_block_alphas", "rank_dropout", "module_dropout",
}  # fmt: skip
OF_LYCORIS = {
    "lycoris_preset", "conv_dim", "conv_alpha", "use_tucker", "rank_dropout", "module_dropout", "rank_dropout_scale",
    "train_norm",
}  # fmt: skip
OF_FLUX = {
    "img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim", "txt_mlp_dim", "txt_mod_dim",
    "single_mod_dim", "in_dims", "train_double_block_indices", "train_single_block_indices", "train_blocks",
    "split_mode", "split_qkv", "train_t5xxl", "rank_dropout", "module_dropout", "train_lora_ggpo", "ggpo_beta",
    "ggpo_sigma",
}  # fmt: skip
CONVOLUTIONS = {"conv_dim", "conv_alpha"}
SHARED = {"loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"}
GUI_FIELDS: Mapping[str, set[str]] = {
    "standard": BLOCKS, "lora-fa": BLOCKS, "kohya locon": BLOCKS | CONVOLUTIONS,
    "kohya dylora": BLOCKS | CONVOLUTIONS | {"unit"}, "anima": {"rank_dropout", "module_dropout"}, "flux1": OF_FLUX,
    "flux1 oft": {"enable_all_linear"},
    "kohya loha": CONVOLUTIONS | {"use_tucker", "rank_dropout", "module_dropout"},
    "kohya lokr": CONVOLUTIONS | {"use_tucker", "rank_dropout", "module_dropout", "factor"},
    "locon": OF_LYCORIS | {"bypass_mode", "dora_wd", "use_scalar"},
    "lycoris/locon": OF_LYCORIS | {"bypass_mode", "dora_wd", "use_scalar"},
    "lycoris/loha": OF_LYCORIS | {"bypass_mode", "dora_wd", "use_scalar"},
    "lycoris/lokr": OF_LYCORIS | {"bypass_mode", "dora_wd", "use_scalar", "factor", "use_cp", "decompose_both"},
    "lycoris/ia3": {"lycoris_preset", "conv_dim", "conv_alpha", "train_on_input"},
    "lycoris/diag-oft": OF_LYCORIS | {"constrain", "rescaled"}, "lycoris/boft": OF_LYCORIS,
    "lycoris/dylora": OF_LYCORIS | {"unit"}, "lycoris/glora": OF_LYCORIS,
    "lycoris/native fine-tuning": {"lycoris_preset", "rank_dropout", "module_dropout", "train_norm"},
}  # fmt: skip
"""Maps LoRA_type of the GUI, in lower case, to the fields that this type reads."""
ALL_FIELDS = {"factor", "use_cp", "unit", "train_on_input", "constrain", "rescaled"}.union(*GUI_FIELDS.values())
PRESETS = {"full-lin": "attention-mlp", "attn-mlp": "attention-mlp", "attn-only": "attention",
           "unet-transformer-only": "attention-mlp"}  # fmt: skip
MAX_RANK = 2048


def take_adapter(t: Translator) -> None:
    """Write the adapter's kind and its targets. Then set the outcome of fields for other kinds."""
    # the kind
    module, of_gui = t.given("network_module"), t.given("lora_type")
    algo = t.given("network_args.algo", "algo")
    chosen, named = _chosen(module, of_gui, algo)
    if of_gui is not None and chosen is of_gui:
        fields = GUI_FIELDS.get(named)
        for setting in t.settings:
            plain = setting.key.lower()
            if fields is not None and plain in ALL_FIELDS - fields - SHARED:
                t.skip(setting, f"{of_gui.shown} does not read it")
    kind = GUI_KINDS.get(named) or LYCORIS.get(named) or MODULES.get(named)
    if chosen is not None and kind is None:
        what = NAMES.get(named, "this kind of adapter")
        t.lose(chosen, f"would train {what}; the recipe trains a LoRA", ours="lora.type")
    elif chosen is not None and kind != "lora":
        t.take("lora.type", kind, chosen)
    for each in (module, of_gui, algo):
        if each is not None and not t.is_settled(each) and each.value not in (None, ""):
            t.skip(each, "a LoRA" if each is chosen else "it names the library")
    # where it is attached
    is_lycoris = named.startswith("lycoris/") or named == "locon" or (algo is not None and chosen is algo)
    is_lycoris = is_lycoris or str(module.value if module is not None else "").startswith("lycoris.")
    _take_targets(t, is_lycoris=is_lycoris, module=module)


def _chosen(module: Setting | None, of_gui: Setting | None, algo: Setting | None) -> tuple[Setting | None, str]:
    """Return the setting that names the kind of adapter, and the kind in lower case."""
    is_lycoris = module is None or str(module.value).lower().startswith("lycoris.")
    if algo is not None and is_lycoris:
        return algo, str(algo.value).strip().strip("\"'").lower()
    if module is not None and str(module.value).lower().startswith("lycoris."):
        return module, "lora"
    chosen = module if module is not None and module.value else of_gui
    return (None, "") if chosen is None or not chosen.value else (chosen, str(chosen.value).strip().lower())


def _take_targets(t: Translator, *, is_lycoris: bool, module: Setting | None) -> None:
    family = t.values["model.family"].value
    preset = t.given("network_args.preset", "preset", "lycoris_preset")
    name = str(preset.value) if preset is not None and preset.value else "full"
    everything = "all-linear" if family in ("flux", "anima") else "attention-mlp-conv"
    if is_lycoris and "lora.type" in t.values and t.values["lora.type"].value == "ia3":
        if preset is not None:
            t.skip(preset, "an IA3 has its own modules")
    elif is_lycoris and preset is None:
        t.take("lora.targets", everything, note="LyCORIS' default: preset = full")
    elif is_lycoris and preset is not None and (own := PRESETS.get(name, everything if name == "full" else None)):
        t.take("lora.targets", own, preset, note="LyCORIS' presets also have time embeddings and other small layers")
    elif preset is not None and not t.is_settled(preset):
        if is_lycoris:
            t.lose(preset, "would choose the modules", ours="lora.targets")
        else:
            t.skip(preset, "only LyCORIS reads it")
    elif family == "flux":
        t.take(
            "lora.targets", "all-linear", note="kohya has one factor A for q, k and v; in lora-rocm each has its own"
        )


# functions of the table


def rank(t: Translator, setting: Setting) -> None:
    """Translate the rank. LyCORIS takes a huge rank as an instruction not to factorise the second matrix of a LoKr."""
    found = number(setting.value)
    if _is_rank_of_weights(t):
        t.skip(setting, "dim_from_weights takes it from the file")
    elif not found:
        t.lose(setting, "it is not a number", ours="lora.rank")
    elif found > MAX_RANK:
        t.take("lora.rank", MAX_RANK, setting, note="the highest rank in lora-rocm")
    else:
        t.take("lora.rank", whole(found), setting)


def rank_of_weights(t: Translator, setting: Setting) -> None:
    """Translate the switch that takes the rank from the file with which training starts."""
    if not is_on(setting.value):
        t.skip(setting, "it is off")
    elif _is_rank_of_weights(t):
        t.take("lora.rank", "auto", setting)
    else:
        t.lose(setting, "would take the rank from network_weights, which was not found", ours="lora.rank")


def _is_rank_of_weights(t: Translator) -> bool:
    """Whether the rank comes from a file on this machine. lora-rocm reads it whenever it loads the recipe."""
    switch, file = t.given("dim_from_weights"), t.given("network_weights", "lora_network_weights")
    if switch is None or not is_on(switch.value) or file is None or not file.value:
        return False
    try:
        return Path(path_text(file.value)).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no home
        return False


def alpha(t: Translator, setting: Setting) -> None:
    """Translate alpha. kohya replaces an alpha of 0 by the rank."""
    found = number(setting.value)
    dims = t.value("network_dim")
    if found == 0:  # lora.py: alpha = dim if alpha is None or alpha == 0
        t.take("lora.alpha", whole(number(dims) or 1), setting, note="0 means the rank")
    elif found is None:
        t.lose(setting, "it is not a number", ours="lora.alpha")
    else:
        t.take("lora.alpha", whole(found), setting)


def convolution(t: Translator, setting: Setting) -> None:
    """Translate rank or alpha of convolutions. networks.lora adapts convolutions only if ``conv_dim`` is set."""
    is_alpha = setting.key.lower().endswith("alpha")
    dims = t.given("network_args.conv_dim", "conv_dim")
    conv = number(dims.value) if dims is not None else None
    found = number(setting.value)
    kind = t.values.get("lora.type", RecipeValue("lora", ())).value
    targets = t.values.get("lora.targets")
    if found is None or not conv:
        t.skip(setting, "convolutions have no other rank")
        return
    if targets is not None and targets.value != "attention-mlp-conv":
        t.skip(setting, "convolutions are not adapted")
        return
    if targets is None:
        t.take("lora.targets", "attention-mlp-conv")
    if kind == "lora":
        t.take("lora.conv_alpha" if is_alpha else "lora.conv_rank", whole(found), setting)
        if targets is None and t.given("network_args.conv_alpha", "conv_alpha") is None:
            t.take("lora.conv_alpha", 1, note="kohya's default")
    elif found == number(t.value("network_alpha" if is_alpha else "network_dim")):
        t.skip(setting, "it is the same as for other layers")
    else:
        what = "alpha" if is_alpha else "rank"
        t.lose(setting, f"would be the {what} of convolutions", ours=f"lora.conv_{what}")


def dora(t: Translator, setting: Setting) -> None:
    """Translate the switch for DoRA."""
    if not is_on(setting.value):
        t.skip(setting, "it is off")
    elif t.values.get("lora.type", RecipeValue("lora", ())).value == "lora":
        t.take("lora.use_dora", True, setting)
    else:
        t.lose(setting, "would train magnitudes; in lora-rocm only a LoRA has them", ours="lora.use_dora")


def loraplus(t: Translator, setting: Setting) -> None:
    """Translate LoRA+. The UNet's ratio is used for the text encoders, too."""
    found = number(setting.value)
    of_unet = t.given("network_args.loraplus_unet_lr_ratio", "loraplus_unet_lr_ratio")
    has_own = of_unet is not None and bool(number(of_unet.value))
    if not found:
        t.skip(setting, "it is off")
    elif "text_encoder" in setting.key:
        has_text_encoder = "lora.train_text_encoder" in t.values
        t.lose(setting, "would be the ratio of the text encoders", changes_weights=has_text_encoder)
    elif has_own and setting is not of_unet:
        t.skip(setting, "loraplus_unet_lr_ratio takes precedence")
    else:
        t.take("lora.loraplus_lr_ratio", found, setting)


def constraint(t: Translator, setting: Setting) -> None:
    """Translate the limit of an OFT's rotations."""
    found = number(setting.value)
    if not found:
        t.skip(setting, "it is off")
    else:
        t.take("lora.constraint", found, setting)


def dropout(t: Translator, setting: Setting) -> None:
    """Translate the dropout of ranks, modules and neurons."""
    found = number(setting.value)
    name = setting.key.lower().rpartition(".")[2]
    ours = "dropout" if name == "network_dropout" else name
    if not found:
        t.skip(setting, "it is off")
    else:
        note = "kohya: of the values between A and B; in lora-rocm of the input" if ours == "dropout" else ""
        t.take(f"lora.{ours}", found, setting, note=note)


# values of single blocks


def blocks(t: Translator, setting: Setting) -> None:
    """Translate the values of all blocks. They are written when the first of their keys is translated."""
    # what is given
    known = {name: t.given(f"network_args.{name}", name) for name in BLOCK_KEYS}
    given = {name: each for name, each in known.items() if each is not None and each.value not in (None, "")}
    layout = BLOCKS_OF.get(str(t.values["model.family"].value))
    if layout is None:
        t.lose(setting, "would set values of single blocks", ours="lora.overrides")
        return
    ranks, alphas = (_numbers(given, name, len(layout)) for name in ("block_dims", "block_alphas"))
    factors = _factors(t, given, len(layout))
    # an entry for each block with modules
    with_convolutions = t.values.get("lora.targets", RecipeValue("", ())).value == "attention-mlp-conv"
    present = [(index, block) for index, (block, has) in enumerate(layout) if block and (has or with_convolutions)]
    found = {block: _entry(t, index, ranks, alphas, factors) for index, block in present}
    off = {block for block, entry in found.items() if 0 in (entry.get("rank"), entry.get("learning_rate"))}
    entries = [{"match": block, **entry} for block, entry in found.items() if entry and block not in off]
    # write them
    readable = (("block_dims", ranks), ("block_alphas", alphas))
    used = [given[name] for name, values in readable if values and name in given]
    used += [each for name, each in given.items() if factors and name.endswith("_lr_weight")]
    if (entries or off) and used and len(off) < len(present):
        _take_blocks(t, entries, used)
        _take_targets_without(t, off, [block for _, block in present], used, with_convolutions=with_convolutions)
    for each in [*given.values(), setting]:
        if not t.is_settled(each):
            t.lose(each, "would set values of single blocks", ours="lora.overrides")


def _entry(
    t: Translator,
    index: int,
    ranks: Sequence[float] | None,
    alphas: Sequence[float] | None,
    factors: list[float] | None,
) -> dict[str, Value]:
    """Return the values that differ in one block."""
    entry: dict[str, Value] = {}
    rate = number(_rate(t))
    if ranks is not None:
        entry["rank"] = int(ranks[index])
    if ranks is not None or alphas is not None:
        entry["alpha"] = whole(alphas[index] if alphas is not None else number(t.value("network_alpha")) or 1)
    if factors is not None and factors[index] != 1 and rate:
        entry["learning_rate"] = float(f"{rate * factors[index]:.6g}")
    return entry


def _take_blocks(t: Translator, entries: Sequence[Mapping[str, Value]], used: Sequence[Setting]) -> None:
    for index, entry in enumerate(entries):
        for name, value in entry.items():
            t.take(f"lora.overrides[{index}].{name}", value, *(used if (index, name) == (0, "match") else ()))


def _take_targets_without(
    t: Translator, off: set[str], present: Sequence[str], used: Sequence[Setting], *, with_convolutions: bool
) -> None:
    """Attach the LoRA only to the blocks that are not in ``off``."""
    if not off:
        return
    patterns = [block.removeprefix("unet\\.") for block in present if block not in off]
    if not with_convolutions:
        patterns = [each.replace("(attentions|resnets)", "attentions").removesuffix(".*") + LINEAR for each in patterns]
    t.values.pop("lora.targets", None)
    t.take("lora.targets", [*patterns], *used, note="blocks with 0 have no LoRA")


LINEAR = r".*(proj_in|proj_out|attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
BLOCK_KEYS = ("block_dims", "block_alphas", "down_lr_weight", "mid_lr_weight", "up_lr_weight")
CURVES: Mapping[str, Callable[[float], float]] = {
    "sine": lambda x: math.sin(math.pi * x / 2), "cosine": lambda x: math.sin(math.pi * (1 - x) / 2),
    "linear": lambda x: x, "reverse_linear": lambda x: 1 - x, "zeros": lambda x: 0.0,
}  # fmt: skip


def _rate(t: Translator) -> Value:
    known = t.given("unet_lr")
    return known.value if known is not None and number(known.value) else t.value("learning_rate")


def _numbers(given: Mapping[str, Setting], name: str, count: int) -> list[float] | None:
    """Return a key's values for all blocks; None if the key is absent or has another number of values."""
    setting = given.get(name)
    if setting is None:
        return None
    found = _listed(setting.value)
    return found if found is not None and len(found) == count else None


def _listed(value: Value) -> list[float] | None:
    parts = value if isinstance(value, list) else str(value).strip("\"'").split(",")
    found = [0.0 if each == "" else number(each) for each in parts]
    return None if any(each is None for each in found) else [each or 0.0 for each in found]


def _factors(t: Translator, given: Mapping[str, Setting], count: int) -> list[float] | None:
    """Return the factor of the learning rate for each block; None if no key has factors, or one cannot be read."""
    has_edges = count == 23  # SDXL counts the first and the last layer, which have no LoRA
    side, middle = (9, 3) if has_edges else (12, 1)
    found = list[float]()
    for name, size in (("down_lr_weight", side), ("mid_lr_weight", middle), ("up_lr_weight", side)):
        setting = given.get(name)
        values = [1.0] * size if setting is None else _curve(setting.value, size) or _listed(setting.value)
        if values is None:
            return None
        found += [*values, *[1.0] * size][:size]
    if not any(name in given for name in ("down_lr_weight", "mid_lr_weight", "up_lr_weight")):
        return None
    threshold = number(t.value("network_args.block_lr_zero_threshold", "block_lr_zero_threshold")) or 0.0
    found = [factor if factor > threshold else 0.0 for factor in found]
    return [1.0, *found, 1.0] if has_edges else found


def _curve(value: Value, size: int) -> list[float] | None:
    name, _, base = str(value).strip().partition("+")
    if name not in CURVES:
        return None
    return [CURVES[name](place / (size - 1)) + (number(base) or 0.0) for place in range(size)]


def _blocks_of_side(side: str, count: int, without_attention: int) -> list[Block]:
    """Return the layers on one side of a UNet.

    Each block has two or three layers, and one layer that changes the size.
    """
    found = []
    for block in range(count):
        has_attention = block != without_attention
        for layer in range(3):
            inner = rf"(attentions|resnets)\.{layer}"
            if layer == 2:
                inner = "downsamplers" if side == "down" else rf"({inner}|upsamplers)"
            found.append((rf"unet\.{side}_blocks\.{block}\.{inner}\..*", has_attention and inner != "downsamplers"))
    return found


Block = tuple[str, bool]
NO_MODULES: Block = ("", False)
OF_SD = [
    NO_MODULES, *_blocks_of_side("down", 4, 3)[:-1], (r"unet\.mid_block\..*", True), *_blocks_of_side("up", 4, 0)
]  # fmt: skip
BLOCKS_OF: Mapping[str, Sequence[Block]] = {
    "sd15": OF_SD,
    "sd2": OF_SD,
    "sdxl": [
        NO_MODULES, NO_MODULES, *_blocks_of_side("down", 3, 0)[:-1], (r"unet\.mid_block\.resnets\.0\..*", False),
        (r"unet\.mid_block\.attentions\..*", True), (r"unet\.mid_block\.resnets\.1\..*", False),
        *_blocks_of_side("up", 3, 2), NO_MODULES,
    ],
}  # fmt: skip
"""Maps a family to (pattern for the modules, whether there is attention) of each block, in kohya's order."""
