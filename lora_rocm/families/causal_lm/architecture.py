"""What differs between the architectures of language models: class, config, blocks, and what is done to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from lora_rocm.base_models import conversion
from lora_rocm.base_models.conversion import State
from lora_rocm.base_models.loading import Layout, Part
from lora_rocm.errors import ModelError
from lora_rocm.families.causal_lm.attention import APART, NAME, samples_apart
from lora_rocm.families.causal_lm.objective import Head
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, read_config

COMPONENT = "model"
COMPARED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text", "phi3", "smollm3", "gpt_oss"})
"""Types of model whose logits tests compare with those of transformers. Any other is compared when it is loaded."""
UNREAD_KEYS = ("attn_logit_softcapping", "attention_chunk_size", "use_bidirectional_attention")
"""Keys of a config that ask for an attention which ``attention.causal`` is not."""
WINDOWS = {"full_attention", "sliding_attention"}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "embedding_dropout")
OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
OLD_NAMES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
GEMMA3, GPT_OSS = "gemma3", "gpt_oss"
PROBE_TOKENS = 8
CLOSE = 0.05  # of the logits' spread: what bfloat16 explains, and a wrong mask or scale does not


class Blocks(nn.ModuleList):
    """The blocks of a decoder, which are called by ``run`` when its forward goes through them."""

    run: Callable[..., Any] | None = None

    def __getitem__(self, index: Any) -> Any:
        found = [*self._modules.values()][index]
        return [self._called(block) for block in found] if isinstance(index, slice) else self._called(found)

    def __iter__(self) -> Iterator[Any]:
        return map(self._called, self._modules.values())

    def _called(self, block: Any) -> Any:
        return _Called(self.run, block) if self.run is not None and torch.is_grad_enabled() else block


class _Called:
    """Stands for a block in a forward pass; its attributes are the block's."""

    def __init__(self, run: Callable[..., Any], block: nn.Module) -> None:
        self._run, self._block = run, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._block, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def layout_of(folder: Path) -> Layout:
    """The layout of a model in a folder of transformers.

    Raises:
        ModelError: config-missing, config-unreadable, custom-code, not-a-language-model, architecture-unknown.
    """
    path = folder / "config.json"
    found = read_config(path)
    kind = printable(str(found.get("model_type")))[:80]
    if found.get("auto_map"):
        raise ModelError(
            "custom-code",
            "This model comes with code of its own, which would run with all your rights: it is not loaded.",
            where=f"{path}: auto_map",
            fix="Use a model whose architecture is part of transformers.",
        )
    if found.get("model_type") not in CONFIG_MAPPING:
        raise _unknown(path, f"It is of the type {kind}, which this version of transformers does not know")
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[found["model_type"]], None)
    if cls is None or found.get("is_encoder_decoder"):
        raise _unknown(path, f"A model of the type {kind} does not write the next token of a text")
    text = found.get("text_config", found)
    odd = [key for key in UNREAD_KEYS if text.get(key)]
    odd += sorted(set(text.get("layer_types") or ()) - WINDOWS)
    odd += ["vision_config"] * ("vision_config" in found and kind != GEMMA3)
    if odd or not cls._supports_attention_backend:
        raise _unknown(path, f"Models of the type {kind} compute in a way that is not trained here ({', '.join(odd)})")
    if kind == GPT_OSS:
        if found.get("quantization_config", {}).get("quant_method") != "mxfp4":
            raise _unknown(path, "Of gpt-oss only the editions with experts in MXFP4 are trained, which this is not")
        from lora_rocm.families.causal_lm.gpt_oss import PackedGptOss as cls  # noqa: N813
    if kind == GEMMA3:
        from lora_rocm.families.causal_lm.gemma3 import Gemma3Text as cls  # noqa: N813
    part = Part(cls, "", conversion.own_names, from_folder=_names, ignored=OF_IMAGES)
    return Layout({COMPONENT: part}, {"tokenizer": ""}, folder, changed={COMPONENT: _without_dropout})


def _unknown(path: Path, what: str) -> ModelError:
    fix = "Use a decoder such as Llama, Qwen, Gemma 3, Mistral, Phi, SmolLM or gpt-oss, or a newer transformers."
    return ModelError("architecture-unknown", f"{what}.", where=str(path), fix=fix)


def _names(state: State, module: nn.Module) -> State:
    """The text model's tensors of a model that reads images too, which older versions named otherwise."""
    own = {name: tensor for name, tensor in state.items() if not any(part in name for part in OF_IMAGES)}
    for old, new in OLD_NAMES.items():
        own = {new + name.removeprefix(old) if name.startswith(old) else name: own[name] for name in own}
    return conversion.own_names(own, module)


def _without_dropout(config: Mapping[str, Any], tensors: object) -> dict[str, Any]:
    """The keys of a config that are others in training: no dropout and no cache of keys and values."""
    changed = {key: 0.0 for key in DROPOUTS if key in config}
    if "text_config" in config:
        return {**changed, "text_config": {**config["text_config"], **_without_dropout(config["text_config"], ())}}
    return {**changed, "use_cache": False}


def prepared(model: nn.Module) -> nn.Module:
    """A model as it is trained: attention without a mask, tied weights as one, and blocks that can be recomputed.

    Raises:
        ModelError: its blocks are not found.
    """
    whole: Any = model
    inside = decoder(model)
    whole.config._attn_implementation = inside.config._attn_implementation = NAME
    layers = getattr(inside, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        what = f"Its {type(inside).__name__} has no list of blocks"
        raise _unknown(Path(whole.config.name_or_path or "config.json"), what)
    inside.layers = Blocks(layers)
    if whole.config.get_text_config().tie_word_embeddings:
        whole.get_output_embeddings().weight = whole.get_input_embeddings().weight
    return model


def decoder(model: nn.Module) -> Any:
    """The part of a model that gives the last hidden states."""
    whole: Any = model
    return whole.get_decoder()


def states_of(model: nn.Module, ids_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
    """The last hidden states of tokens [B, S, D].

    positions_BS: the place of each token in its sample, if a row has several; none of these sees another.
    """
    inside, more = decoder(model), dict[str, Tensor]()
    if positions_BS is not None:
        dtype = inside.get_input_embeddings().weight.dtype
        more = {"position_ids": positions_BS, APART: samples_apart(positions_BS, dtype)}
    states_BSD: Tensor = inside(input_ids=ids_BS, use_cache=False, **more).last_hidden_state
    return states_BSD


def head_of(model: nn.Module) -> Head:
    """The head of a model, with the model's scale and soft cap."""
    whole: Any = model
    config = whole.config.get_text_config()
    cap, divisor = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_scaling"))
    return Head(whole.get_output_embeddings(), (getattr(config, "logit_scale", None) or 1) / (divisor or 1), cap)


@torch.no_grad()
def require_same(model: nn.Module, where: str) -> None:
    """Compare logits of an architecture that no test knows with transformers' own, with its own attention.

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
            f"A model of the type {config.model_type} computes otherwise here than in transformers.",
            where=where,
            fix=f"Use another model, and please report this. {DOWNLOAD_AGAIN}",
        )


@torch.no_grad()
def require_apart(model: nn.Module, where: str) -> None:
    """Compare the states of two samples in one row with those of each alone, in an architecture that no test knows.

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
    except TypeError:  # it hands on no arguments to its attention
        equal = False
    if not equal:
        raise ModelError(
            "packing-unequal",
            f"In a model of the type {whole.config.model_type}, samples in one row see each other.",
            where=where,
            fix="Remove data.packing.",
        )
