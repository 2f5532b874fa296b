"""Differences between architectures of language models: class, config, blocks, and scaling of the logits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.integrations import moe

from lora_rocm.base_models import conversion
from lora_rocm.base_models.conversion import State
from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.errors import ModelError
from lora_rocm.families.causal_lm.attention import APART, NAME, samples_apart
from lora_rocm.families.causal_lm.objective import Head
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, Config, given, read_config

COMPONENT, TOKENIZER = "model", "tokenizer"
COMPARED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3", "smollm3", "gpt_oss"})
"""Model types with logits that the project's tests compare with transformers. All other types are compared when a
model is loaded.
"""
UNREAD_KEYS = ("attn_logit_softcapping", "attention_chunk_size", "use_bidirectional_attention")
"""Config keys that require a different attention than ``attention.causal``."""
WINDOWS = {"full_attention", "sliding_attention"}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "embedding_dropout")
OF_IMAGES_ONLY = (("use_bidirectional_attention", "vision"),)
"""Pairs of key and value that are accepted although the key is in ``UNREAD_KEYS``: they affect only image tokens."""
GPT_OSS = "gpt_oss"
PROBE_TOKENS = 8
CLOSE = 0.05  # of the logits' spread: more than errors of bfloat16, less than a wrong mask or scale


class Blocks(nn.ModuleList):
    """The decoder's list of blocks, in which each block is called through ``run``.

    If ``run`` is set and gradients are enabled, accessing a block returns a wrapper, which calls the block through
    ``run``.
    """

    run: Callable[..., Any] | None = None

    def __getitem__(self, index: Any) -> Any:
        found = [*self._modules.values()][index]
        return [self._called(block) for block in found] if isinstance(index, slice) else self._called(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._called, self._modules.values())

    def _called(self, block: Any) -> Any:
        return _Called(self.run, block) if self.run is not None and torch.is_grad_enabled() else block


class _Called:
    """Wraps a block so that it is called through ``run``. Attributes are read from the block."""

    def __init__(self, run: Callable[..., Any], block: nn.Module) -> None:
        self._run, self._block = run, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._block, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def layout_of(folder: Path) -> ModelLayout:
    """Return the layout of a model in a transformers folder.

    Raises:
        ModelError: config-missing, config-unreadable, custom-code, not-a-language-model, architecture-unknown.
    """
    path = folder / "config.json"
    found = read_config(path)
    kind = given(found, "model_type", str, path) or ""
    shown = printable(kind)[:80] or "(missing in its config)"
    if found.get("auto_map"):
        raise ModelError(
            "custom-code",
            "This model comes with its own code, which would run with all your permissions, so it is not loaded.",
            where=f"{path}: auto_map",
            fix="Use a model with an architecture that is part of transformers.",
        )
    # The class: known to transformers, and a decoder.
    if kind not in CONFIG_MAPPING:
        raise _unknown(path, f"This version of transformers does not know the model type {shown}")
    text = given(found, "text_config", dict, path)
    cls = _class_of(kind, None if text is None else given(text, "model_type", str, path))
    if cls is None or found.get("is_encoder_decoder"):
        raise _unknown(path, f"Models of the type {shown} do not predict the next token of a text")
    # Keys that would change the computation, for example another attention.
    in_text = found if text is None else text
    odd = [key for key in UNREAD_KEYS if in_text.get(key) and (key, in_text[key]) not in OF_IMAGES_ONLY]
    kinds = given(in_text, "layer_types", list, path, or_null=True) or []
    odd += sorted({str(name) for name in kinds} - WINDOWS)
    odd += ["vision_config"] * ("vision_config" in found and text is None)
    if odd or not cls._supports_attention_backend:
        named = f" ({printable(', '.join(odd))[:200]})" if odd else ""
        raise _unknown(path, f"Models of the type {shown} use features that cannot be trained here{named}")
    if kind == GPT_OSS:
        stored = given(found, "quantization_config", dict, path, or_null=True) or {}
        if stored.get("quant_method") != "mxfp4":
            raise _unknown(
                path,
                "gpt-oss can only be trained with experts in MXFP4, but the experts of this model are not in MXFP4",
            )
        from lora_rocm.families.causal_lm.gpt_oss import PackedGptOss as cls  # noqa: N813
    # The layout: one component, without the parts that are not the text model.
    finish = None if text is None else only_text
    tokenizers = {TOKENIZER: TokenizerOf("", COMPONENT)}
    part = ComponentLayout(cls, "", conversion.own_names, from_folder=published, finish=finish, unread=_unread)
    return ModelLayout({COMPONENT: part}, tokenizers, folder, changed={COMPONENT: _without_dropout})


def _class_of(kind: str, text_kind: str | None) -> Any:
    """Return the transformers class that loads a model type, or None if such models do not predict the next token.

    text_kind: type of the text model inside the model, or None if the config has no separate text model.
    """
    config = CONFIG_MAPPING[kind]
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
    if text_kind is None:
        return cls
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(config, None)
    if text_kind not in CONFIG_MAPPING or not getattr(whole, "__name__", "").endswith("ForConditionalGeneration"):
        return cls
    if cls not in (None, whole) or whole.config_class is not config:
        return cls  # AutoModelForCausalLM would load the text model, but with different names than the published ones
    text: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[text_kind], None)
    return whole if text is not None and text._supports_attention_backend else None


def require_ends(source: BaseSource, tokenizer: str) -> None:
    """Refuse a config with an end-of-text token id outside the model's embedding table.

    Raises:
        ModelError: config-unreadable.
    """
    rows, config = source.table_rows(tokenizer), source.config(COMPONENT)
    configs, beside = [config], config.path.with_name("generation_config.json")
    text = given(config.values, "text_config", dict, config.path)
    if text is not None:
        configs.append(Config(text, config.path))
    if beside.is_file():
        configs.append(Config(read_config(beside), beside))
    for each in configs:
        each.ids("eos_token_id", rows)


def only_text(model: Any) -> None:
    """Remove all modules except the decoder and the output head. The remaining modules keep their names."""
    kept = {*decoder(model).modules(), *model.get_output_embeddings().modules()}
    for owner in [each for each in model.modules() if each not in kept]:
        for name, child in owner.named_children():
            if not any(each in kept for each in child.modules()):
                setattr(owner, name, None)


def _unread(module: nn.Module) -> list[str]:
    """Return name patterns of tensors that the model does not read.

    These are the tensors that transformers lists, and all tensors in removed modules.
    """
    model: Any = module
    gone = {name for each in module.modules() for name, child in each._modules.items() if child is None}
    return [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(rf"(^|\.){re.escape(name)}\." for name in sorted(gone)),
    ]


def _unknown(path: Path, what: str) -> ModelError:
    fix = "Use a decoder such as Llama, Qwen, Gemma, Mistral, Phi, SmolLM or gpt-oss, or a newer transformers."
    return ModelError("architecture-unknown", f"{what}.", where=str(path), fix=fix)


def _without_dropout(of_file: Config, tensors: object) -> dict[str, Any]:
    """Return config values to change for training: no dropout and no KV cache."""
    config = of_file.values
    changed = {key: 0.0 for key in DROPOUTS if key in config}
    if "text_config" in config:
        text = config["text_config"]
        dropouts = {key: 0.0 for key in DROPOUTS if key in text}
        return {**changed, "text_config": {**text, **dropouts, "use_cache": False}}
    return {**changed, "use_cache": False}


def prepared(model: nn.Module) -> nn.Module:
    """Prepare a model for training: set maskless attention, tie weights, and make blocks recomputable.

    Raises:
        ModelError: the model has no list of blocks.
    """
    use_working_product()
    whole: Any = model
    inside = decoder(model)
    whole.config._attn_implementation = inside.config._attn_implementation = NAME
    layers = getattr(inside, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        what = f"The model's decoder, {type(inside).__name__}, has no list of blocks"
        raise _unknown(Path(whole.config.name_or_path or "config.json"), what)
    inside.layers = Blocks(layers)
    if whole.config.get_text_config().tie_word_embeddings:
        whole.get_output_embeddings().weight = whole.get_input_embeddings().weight
    return model


def decoder(model: nn.Module) -> Any:
    """Return the part of a model that computes the last hidden states."""
    whole: Any = model
    return whole.get_decoder()


def plain_embedding(model: nn.Module) -> tuple[str, nn.Embedding] | None:
    """Return path and module of the token embedding if a pass needs only its rows, else None.

    The output head must not use it, it must be frozen without an adapter or new tokens, and not scale its rows.
    """
    whole: Any = model  # untyped: a model of transformers
    table = whole.get_input_embeddings()
    if type(table) is not nn.Embedding or table.weight.requires_grad:  # a subclass may scale the rows
        return None
    if sum(weight is table.weight for _, weight in model.named_parameters(remove_duplicate=False)) > 1:
        return None
    return next((path, table) for path, module in model.named_modules() if module is table)


def states_of(
    model: nn.Module, ids_BS: Tensor, positions_BS: Tensor | None = None, rows_BSD: Tensor | None = None
) -> Tensor:
    """Return the last hidden states of tokens, shape [B, S, D].

    positions_BS: each token's position within its sample, or None if a row has only one sample. Several samples in a
    row do not attend to each other. rows_BSD: rows of the token embedding, or None if the model looks them up.
    """
    inside, more = decoder(model), dict[str, Tensor]()
    if positions_BS is not None:
        dtype = inside.get_input_embeddings().weight.dtype
        more = {"position_ids": positions_BS, APART: samples_apart(positions_BS, dtype)}
    tokens = {"input_ids": ids_BS} if rows_BSD is None else {"inputs_embeds": rows_BSD}
    states_BSD: Tensor = inside(**tokens, use_cache=False, **more).last_hidden_state
    return states_BSD


def head_of(model: nn.Module) -> Head:
    """Return the output head of a model, with the model's scale and soft cap."""
    whole: Any = model
    config = whole.config.get_text_config()
    cap, divisor = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_scaling"))
    return Head(whole.get_output_embeddings(), (getattr(config, "logit_scale", None) or 1) / (divisor or 1), cap)


@torch.no_grad()
def require_same(model: nn.Module, where: str) -> None:
    """Check that a model with an untested architecture has the same logits as with transformers' own attention.

    Raises:
        ModelError: architecture-differs.
    """
    whole: Any = model
    config: PreTrainedConfig = whole.config
    if config.model_type in COMPARED:
        return
    inside = decoder(model)
    ids_BS = torch.arange(PROBE_TOKENS)[None]
    ours = head_of(model)(states_of(model, ids_BS))
    config._attn_implementation = inside.config._attn_implementation = "eager"
    theirs = whole(input_ids=ids_BS, use_cache=False).logits.float()
    config._attn_implementation = inside.config._attn_implementation = NAME
    if not float((ours - theirs).norm()) <= CLOSE * float(theirs.norm()):
        raise ModelError(
            "architecture-differs",
            f"A model of the type {config.model_type} computes different results in this program than in transformers.",
            where=where,
            fix=f"Use another model, and please report this. {DOWNLOAD_AGAIN}",
        )


@torch.no_grad()
def require_apart(model: nn.Module, where: str) -> None:
    """Check, for an untested architecture, that samples packed into one row do not affect each other.

    The hidden states of two packed samples are compared with each sample's own.

    Raises:
        ModelError: packing-unequal.
    """
    whole: Any = model
    if whole.config.model_type in COMPARED:
        return
    ids_BS, places_BS = torch.arange(PROBE_TOKENS)[None], torch.arange(PROBE_TOKENS // 2)[None]
    try:
        found = states_of(model, ids_BS, torch.cat([places_BS, places_BS], 1))
        wanted = torch.cat([states_of(model, half_BS) for half_BS in ids_BS.split(PROBE_TOKENS // 2, 1)], 1)
        equal = float((found - wanted).norm()) <= CLOSE * float(wanted.norm())
    except TypeError:  # it passes no arguments on to its attention
        equal = False
    if not equal:
        raise ModelError(
            "packing-unequal",
            f"Samples packed into one row affect each other in models of the type {whole.config.model_type}.",
            where=where,
            fix="Remove data.packing.",
        )


def published(state: State, module: nn.Module) -> State:
    """Convert published tensors to the module's names with transformers' conversion rules, in the order of its loader.

    Transformers has one table of differences between published files and its modules (names, experts stored as separate
    tensors, fused projections). Its loader and PEFT apply this table. Older names are converted afterwards. The tensors
    may be without data.

    If two tensors have the same target, the first one in natural order is used. The other one counts as unread.
    """
    model: Any = module
    expected = module.state_dict(keep_vars=True)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: State = {}
    gathered: dict[str, WeightConverter] = {}  # target name -> the rule with its tensors
    for name in sorted(state, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if pattern is None or target not in expected:
            found.setdefault(target, state[name])
        else:
            rule = gathered.setdefault(target, deepcopy(of_pattern[pattern]))
            rule.add_tensor(target, name, pattern, state[name])
    for target, rule in gathered.items():
        for name, tensors in rule.convert(target, model=model, config=model.config).items():
            tensor: Tensor = tensors[0] if isinstance(tensors, list) else tensors
            found.setdefault(name, tensor)
    return conversion.own_names(found, module)


SIDE = 16  # smallest rows that the product takes
LOG = logging.getLogger(__name__)


@cache
def takes_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped matrix product works for this dtype and device, forward and backward.

    It is tried only once.
    """
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    try:
        with torch.enable_grad():
            rows_SI = torch.ones(2 * SIDE, SIDE, device=device, dtype=dtype, requires_grad=True)
            weight_EIO = torch.ones(2, SIDE, SIDE, device=device, dtype=dtype)
            ends_E = torch.tensor([SIDE, 2 * SIDE], device=device, dtype=torch.int32)
            found_SO = product(rows_SI, weight_EIO, offs=ends_E)
            # not of a sum: its gradient has strides that are not supported
            found_SO.backward(torch.ones_like(found_SO))
    except RuntimeError as error:
        if device.type != "meta":
            LOG.warning(
                "PyTorch's grouped matrix product does not support %s on %s (%s), so experts are "
                "computed one after another",
                dtype,
                device,
                str(error).splitlines()[0],
            )
        return False
    return True


def use_working_product() -> None:
    """Make transformers call ``takes_grouped`` before it uses PyTorch's grouped product. A second call does nothing.

    Without this, transformers uses the grouped product for any dtype, but up to torch 2.11 GPUs support only bfloat16.
    If ``takes_grouped`` returns False, transformers loops over the experts.
    """
    known = moe._can_use_grouped_mm
    if getattr(known, "asks_dtype", False):
        return

    def can_use(input: Tensor, weight: Tensor, offs: Tensor) -> bool:  # noqa: A002 (transformers' name)
        return bool(known(input, weight, offs)) and takes_grouped(weight.device, weight.dtype)

    can_use.asks_dtype = True  # type: ignore[attr-defined]
    moe._can_use_grouped_mm = can_use
