"""The family of language models that predict the next token.

Samples are padded at the end to a multiple of tokens.

Dimensions: B batch, S tokens, D width, P the two answers of a pair (the chosen answer first).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.base_models import hub
from lora_rocm.base_models.hub import TOKENIZER_OF_TEXT
from lora_rocm.base_models.loading import BaseSource, builtin_folder
from lora_rocm.base_models.random_weights import PREFIX, RandomSource
from lora_rocm.base_models.run_folder import refuse_run
from lora_rocm.cache_store.hash_memory import WEIGHTS_MEMORY, HashMemory
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.dataset.entry_spec import CAPTION, EntrySpec, Pad, TensorSpec
from lora_rocm.dataset.rows.plain_prompts import CONTINUED, UNKNOWN
from lora_rocm.dataset.rows.records import Pair, UnusableText, read
from lora_rocm.dataset.rows.row_reference import separated
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.dataset.sources.text_scan import prompts_are_plain
from lora_rocm.device.placement.base import Placement
from lora_rocm.device.placement.embedding_rows import ROWS, TokenTable
from lora_rocm.errors import DataError, ModelError
from lora_rocm.families.base import Encoder, Inputs, LoadedModel, OwnFiles, PreviewRequest, Sampling, Tensors
from lora_rocm.families.causal_lm.architecture import (
    COMPONENT,
    TOKENIZER,
    Blocks,
    decoder,
    head_of,
    layout_of,
    plain_embedding,
    prepared,
    require_apart,
    require_ends,
    require_same,
    states_of,
)
from lora_rocm.families.causal_lm.chat import ChatTokenizer, Tokens
from lora_rocm.families.causal_lm.fused_blocks import fuse as fuse_blocks
from lora_rocm.families.causal_lm.generation import next_tokens, pieces_of, places_of
from lora_rocm.families.causal_lm.objective import IGNORED, NextToken, Preference, fuse_head, token_distance
from lora_rocm.families.causal_lm.spec import TOKENS_MULTIPLE, LanguageSection
from lora_rocm.families.common.caption_encoder import CaptionEncoder, EncodeCaption
from lora_rocm.families.common.caption_lm import tokenizer_of
from lora_rocm.families.common.component_check import check_component
from lora_rocm.families.common.recompute import Recomputing, evaluating
from lora_rocm.families.common.tokenizers import digest, unreadable
from lora_rocm.families.common.wrong_family import recognised_file, recognised_folder, wrong_family
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives.base import Prediction
from lora_rocm.families.objectives.loss import LOSS_MASK
from lora_rocm.foundation.names import BUILTIN
from lora_rocm.kernels.backend import implementation_for
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import WeightFormat
from lora_rocm.model_files.header import read_header
from lora_rocm.model_files.models import index_of
from lora_rocm.recipe.schema import Recipe

FIX = "Use a language model in the format of transformers: a folder or a hub id."
ENCODING_VERSION = 1  # increase it if the same tokenizer would give other tensors
IDS, LABELS, POSITIONS, START = "input_ids", "labels", "positions", "start_log_probs"
BESIDE = ("config.json", "generation_config.json", "*processor_config.json", "LICENSE*", *TOKENIZER_OF_TEXT)
ATTENTION, MLP = r"self_attn\.\w+", r"mlp\.\w+"
BLOCK = r"(.*\.)?layers\.\d+\."


class CausalLM:
    """Implements ``ModelFamily`` for language models."""

    name = "causal-lm"
    text_components: tuple[str, ...] = ()
    inpaints = False
    all_components = (COMPONENT,)
    encoder_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    lora_file_names = LoraFileNames(  # no format of the spec is read by diffusers
        {COMPONENT: "base_model.model."}, "folded", lambda _, module: f"base_model.model.{module}", lambda *file: {}
    )
    lora_targets = {
        "attention-mlp": {COMPONENT: rf"{BLOCK}({ATTENTION}|{MLP})"},
        "attention": {COMPONENT: rf"{BLOCK}{ATTENTION}"},
        "all-linear": {COMPONENT: rf"{BLOCK}.*"},
    }

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.objective = recipe, NextToken()

    @cached_property
    def source(self) -> BaseSource:
        """The recipe's base model, located and checked but not loaded.

        Raises:
            ModelError: the base is missing, damaged or of an unknown architecture, or cannot be trained on.
        """
        model = self.recipe.model
        name = model.name_or_path
        folder = self._folder(name.removeprefix(PREFIX))
        layout, own = layout_of(folder), {COMPONENT: folder, TOKENIZER: Path(model.parts.get(TOKENIZER, folder))}
        if name.startswith(PREFIX):
            return RandomSource(name, layout, folder, folder, None, own)
        memory = HashMemory(Path(self.recipe.cache.dir), WEIGHTS_MEMORY)
        return BaseSource(name, layout, folder, folder, None, own, memory)

    def take(self, source: BaseSource) -> None:
        """Use a base that was located and checked before."""
        self.source = source

    def _folder(self, name: str) -> Path:
        if name.startswith(BUILTIN):
            return builtin_folder(name)
        # A folder, or a file of another family.
        path, spec = Path(os.path.expanduser(name)), self.recipe.spec
        if os.path.isdir(path):
            refuse_run(path)
            if index_of(path) is not None and (other := recognised_folder(path)) is not None:
                raise wrong_family(name, other.title, spec.title, other.families, FIX, self.recipe.registry)
            return path
        if path.suffix.lower() == ".safetensors" and os.path.isfile(path):
            file = recognised_file(read_header(path))
            if spec.name not in file.families:
                raise wrong_family(name, file.title, spec.title, file.families, FIX, self.recipe.registry)
        if os.path.exists(path) or not hub.resembles_id(name):
            raise ModelError(
                "model-missing",
                "There is no such folder, and this is not a Hugging Face model id.",
                where=f"model.name_or_path: {name}",
                fix="Set it to a folder with config.json, tokenizer and .safetensors files, or to a hub id "
                "(Qwen/Qwen3-4B).",
            )
        # A model on the hub.
        patterns = [*hub.LANGUAGE_MODEL]
        found = hub.download(name, self.recipe.model.revision, patterns, lambda at: any(at.glob("model*.safetensors")))
        if found is None:
            raise ModelError(
                "hub-incomplete",
                "Some files of this model are not downloaded, or it has no safetensors weights.",
                where=f"model.name_or_path: {name}",
                fix="Connect to the network to finish the download, or choose a model that has safetensors weights.",
            )
        return found

    @cached_property
    def notices(self) -> Sequence[str]:
        if isinstance(self.source, RandomSource):
            return ()
        found = [check_component(self.source, COMPONENT, FIX)]
        if not self.texts.takes_conversations:
            found.append(
                "The tokenizer has no chat template, so conversations cannot be trained on, only plain "
                "texts and rows with prompt and completion."
            )
        return tuple(filter(None, found))

    @cached_property
    def texts(self) -> ChatTokenizer:
        asked, tokenizer = self._asked, tokenizer_of(self.source, TOKENIZER, spare_unwritten=True)
        if not hasattr(tokenizer, "backend_tokenizer"):
            why = f"{type(tokenizer).__name__} has no tokenizer.json, which is needed to locate tokens in a text"
            raise unreadable(self.source.tokenizer_path(TOKENIZER), why)
        most, name = self.recipe.data.max_length, self.source.name
        num_rows = self.source.table_rows(TOKENIZER)
        return ChatTokenizer(tokenizer, most, asked.train_on, name, asked.compares_pairs, num_rows)

    @property
    def _asked(self) -> LanguageSection:
        objective = self.recipe.objective
        assert isinstance(objective, LanguageSection), "by the spec"
        return objective

    def encoders(self) -> Sequence[Encoder]:
        if self._asked.compares_pairs:
            return [PairsEncoder(self)]
        return [RowEncoder(self) if self.recipe.data.packing else TokensEncoder(self)]

    @property
    def start_entry(self) -> EntrySpec | None:
        """Implements ``ComparesWithStart.start_entry``: the log-probabilities of a pair's answers, needed for DPO."""
        if not self._asked.compares_pairs:
            return None
        return EntrySpec("start", (CAPTION,), {START: TensorSpec("float32", "P")})

    def examine(self) -> Sequence[Path]:
        assert self.notices is not None, "the base was checked"
        require_ends(self.source, TOKENIZER)
        folder = self.source.tokenizer_path(TOKENIZER)
        files = (folder / "chat_template.jinja", folder / "tokenizer_config.json")
        self.texts.require_template(str(next((file for file in files if file.is_file()), folder)))
        return self.source.files()

    def token_limits(self) -> Sequence[TokenLimit]:
        return ()

    def own_files(self) -> OwnFiles:
        source = self.source
        if isinstance(source, RandomSource):
            raise ModelError(
                "base-random",
                "The base has random weights, so it has no files to export from.",
                where=f"model.name_or_path: {source.name}",
                fix="Export in the peft format.",
            )
        config = source.config_path(COMPONENT)
        found = {path for pattern in BESIDE for path in config.parent.glob(pattern)}
        found -= {path for pattern in TOKENIZER_OF_TEXT for path in config.parent.glob(pattern)}
        found |= {path for pattern in TOKENIZER_OF_TEXT for path in source.tokenizer_path(TOKENIZER).glob(pattern)}
        return OwnFiles(source, COMPONENT, [config, *sorted(path for path in found - {config} if path.is_file())])

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        return {}

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        assert self.notices is not None, "the base was checked"
        model = prepared(self.source.load(COMPONENT, dtype, device, self.weight_format(COMPONENT)))
        where = f"model.name_or_path: {self.source.name}"
        require_same(model, where)
        if self.recipe.data.packing:
            require_apart(model, f"data.packing, {where}")
        return LoadedModel({COMPONENT: model}, dtype, device)

    def skeleton(self, component: str) -> nn.Module:
        return prepared(self.source.skeleton(component))

    def weight_format(self, component: str) -> WeightFormat:
        model = self.recipe.model
        return quantised(model.quantization, r"(^|\.)layers\.\d+\.", model.compute)

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        return list(self._layers(model).children())

    def token_table(self, model: LoadedModel) -> TokenTable | None:
        """Implements ``EmbedsTokens.token_table``."""
        found = plain_embedding(model.components[COMPONENT])
        return None if found is None else TokenTable(found[1], f"{COMPONENT}.{found[0]}.weight", IDS)

    def recompute_activations(self, model: LoadedModel, run: Callable[..., Any] | None = None) -> None:
        self._layers(model).run = run or Recomputing(model)

    @staticmethod
    def _layers(model: LoadedModel) -> Blocks:
        layers: Blocks = decoder(model.components[COMPONENT]).layers
        return layers

    def example(self, shape: SampleShape, rows: int) -> Tensors:
        if self._asked.compares_pairs:
            zeros_BPS = torch.zeros(rows, 2, shape["tokens"], dtype=torch.int64)
            return {IDS: zeros_BPS, LABELS: zeros_BPS.clone(), START: torch.zeros(rows, 2)}
        zeros_BS = torch.zeros(rows, shape["tokens"], dtype=torch.int64)
        found = {IDS: zeros_BS, LABELS: zeros_BS.clone(), LOSS_MASK: torch.ones(rows, shape["tokens"])}
        return {**found, POSITIONS: zeros_BS.clone()} if self.recipe.data.packing else found

    def fuse(self, model: LoadedModel, triton: bool = True) -> None:
        form = implementation_for(model.device, triton)
        fuse_blocks(self._layers(model), form)
        fuse_head(model.components[COMPONENT], form)

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        if self._asked.compares_pairs:
            return self._compared(model, batch)
        component = model.components[COMPONENT]
        states_BSD = states_of(component, batch[IDS], batch.get(POSITIONS), batch.get(ROWS))
        head, dtype = head_of(component), states_BSD.dtype
        weight_B = states_BSD.new_ones(len(states_BSD), dtype=torch.float32)
        return Prediction(states_BSD, batch[LABELS], weight_B, lambda x, y: token_distance(head, x.to(dtype), y))

    def _compared(self, model: LoadedModel, batch: Tensors) -> Prediction:
        """Return the log-probabilities of both answers, with the DPO loss as their distance."""
        objective = Preference(self._asked.beta, self._asked.label_smoothing)
        log_probs_BP = _log_probs(model, batch[IDS], batch[LABELS], batch.get(ROWS))
        weight_B = log_probs_BP.new_ones(len(log_probs_BP))
        margin_B = objective.margin(log_probs_BP.detach(), batch[START])
        measures = {"accuracy": (margin_B > 0).float(), "reward margin": margin_B}
        return Prediction(log_probs_BP, batch[START], weight_B, objective.distance, measures)

    @torch.no_grad()
    def at_start(self, model: Callable[[], LoadedModel], inputs: Inputs, placement: Placement) -> Tensors:
        """Implements ``ComparesWithStart.at_start``.

        Return zeros for a text that is not a pair, such as a preview's prompt.
        """
        text = str(inputs[CAPTION])
        if not isinstance(read(text), Pair):
            return {START: torch.zeros(2)}
        pair = _encoded_pair(self.texts, text)
        ids_BPS, labels_BPS = (placement.transfer.send_checked(pair[name][None], name) for name in (IDS, LABELS))
        return placement.transfer.receive({START: _log_probs(model(), ids_BPS, labels_BPS)[0]})

    @torch.no_grad()
    def preview(
        self,
        model: LoadedModel,
        requests: Sequence[PreviewRequest],
        text: Callable[[str], Tensors],
        in_tiles: bool = False,
    ) -> list[str]:
        """Return the most likely answer to each prompt. The prompt has the format of the recipe's rows."""
        with evaluating(model.components.values()):
            return [self._answer(model, request.prompt, request.steps) for request in requests]

    def _answer(self, model: LoadedModel, prompt: str, most: int) -> str:
        try:
            ids = self.prompt_ids([{"role": "user", "content": prompt}])
        except UnusableText as error:
            where, fix = f"sample.prompts: {prompt[:80]}", f"{error.fix} Or remove sample.prompts."
            raise DataError("prompt-unusable", error.what, where=where, fix=fix) from error
        tokens = next_tokens(model.components[COMPONENT], ids, Sampling(0.0, 1.0, most, 0), self._ends)
        return str(self.texts.tokenizer.decode([*tokens], skip_special_tokens=True))

    @cached_property
    def _is_plain(self) -> bool | None:
        """Whether the recipe's rows are prompts and answers as plain texts. None if its tables cannot be read now."""
        if not self.texts.takes_conversations:
            return False
        try:
            return prompts_are_plain(self.recipe)
        except DataError:
            return None

    @property
    def prompt_notices(self) -> Sequence[str]:
        """Implements ``Answering.prompt_notices``."""
        return {True: [CONTINUED], False: [], None: [UNKNOWN]}[self._is_plain]

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:  # untyped: JSON values
        """Return the tokens of a conversation in the format of the recipe's rows."""
        return self.texts.prompt_ids(messages, plain=bool(self._is_plain))

    @property
    def _ends(self) -> set[int]:
        return {self.texts.tokenizer.eos_token_id, *self.texts.end_ids}

    def answer(
        self, model: LoadedModel, messages: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Generator[str, None, str]:
        """Implements ``Answering.answer``."""
        component, ids = model.components[COMPONENT], self.prompt_ids(messages)
        places = places_of(component)
        if places is not None and len(ids) >= places:
            what = f"The conversation has {len(ids)} tokens, but the model can read only {places}."
            raise UnusableText(what, "Begin a new conversation.")
        return (yield from pieces_of(next_tokens(component, ids, sampling, self._ends), self.texts.tokenizer))

    @property
    def structure(self) -> str:
        return self.source.settings(COMPONENT)

    def base_facts(self) -> Mapping[str, str]:
        return {"hash": "", "prediction_type": "", "identity": self.source.fingerprint(COMPONENT)}


class TokensEncoder(CaptionEncoder):
    """Encodes a sample as token ids, the next token at each position, and the mask of positions in the loss."""

    entry = EntrySpec(
        "tokens",
        (CAPTION,),
        {
            IDS: TensorSpec("int64", "S", Pad("S")),
            LABELS: TensorSpec("int64", "S", Pad("S", IGNORED)),
            LOSS_MASK: TensorSpec("float32", "S", Pad("S")),
        },
        follows_shape=True,
        share=LOSS_MASK,
    )

    def __init__(self, family: CausalLM) -> None:
        self._family = family

    @cached_property
    def fingerprint(self) -> str:
        folder = self._family.source.tokenizer_path(TOKENIZER)
        files = sorted({path for pattern in TOKENIZER_OF_TEXT for path in folder.glob(pattern) if path.is_file()})
        reader = self._family.texts
        parts = [f"{path.name} {digest([path.read_bytes().hex()])}" for path in files]
        last = " last-turn" if reader.train_on == "last-turn" else ""
        how = f"{reader.max_length} {reader.train_on == 'all'}{last}"  # earlier entries keep their names
        return f"tokens{ENCODING_VERSION}-{digest([*parts, how])}"

    def opened(self, placement: Placement) -> EncodeCaption:
        reader = self._family.texts
        return lambda text: _filled([reader.tokens(read(text))], 0)


class RowEncoder(TokensEncoder):
    """Encodes a row of packed samples (``row_reference.joined``), with each token's position in its sample."""

    entry = EntrySpec(
        "rows",
        (CAPTION,),
        {**TokensEncoder.entry.tensors, POSITIONS: TensorSpec("int64", "S", Pad("S"))},
        follows_shape=True,
        share=LOSS_MASK,
    )

    def opened(self, placement: Placement) -> EncodeCaption:
        return partial(_encoded_row, self._family.texts)


class PairsEncoder(TokensEncoder):
    """Encodes a pair: the ids of each answer after its prompt, and as labels the next tokens that count in the loss."""

    entry = EntrySpec(
        "pairs",
        (CAPTION,),
        {IDS: TensorSpec("int64", "PS", Pad("S")), LABELS: TensorSpec("int64", "PS", Pad("S", IGNORED))},
        follows_shape=True,
    )

    def opened(self, placement: Placement) -> EncodeCaption:
        return partial(_encoded_pair, self._family.texts)


def _encoded_row(reader: ChatTokenizer, row: str) -> Tensors:
    samples = [reader.tokens(read(text)) for text in separated(row)]
    tensors = _filled(samples, 0)
    places = [place for sample in samples for place in range(len(sample.ids))]
    return {**tensors, POSITIONS: torch.tensor([*places, *range(len(tensors[IDS]) - len(places))])}


def _encoded_pair(reader: ChatTokenizer, text: str) -> Tensors:
    """Encode both answers, padded to the same length.

    A text that is not a pair, such as a preview's prompt, takes the place of both answers.
    """
    record = read(text)
    answers = (record.chosen, record.rejected) if isinstance(record, Pair) else (record, record)
    found = [reader.tokens(answer) for answer in answers]
    filled = [_filled([tokens], max(len(each.ids) for each in found)) for tokens in found]
    return {name: torch.stack([tensors[name] for tensors in filled]) for name in (IDS, LABELS)}


def _filled(samples: Sequence[Tokens], length: int) -> Tensors:
    """Return the tensors of concatenated texts, padded to at least ``length`` tokens and to the next multiple."""
    ids = [token for sample in samples for token in sample.ids]
    trained = [counts for sample in samples for counts in (*sample.trained[1:], False)]  # the last one has no next
    fill = max(length - len(ids), 0)
    fill += -(len(ids) + fill) % TOKENS_MULTIPLE
    ids, trained = [*ids, *[0] * fill], [*trained, *[False] * (len(ids) + fill - len(trained))]
    labels = [token if counts else IGNORED for token, counts in zip([*ids[1:], 0], trained, strict=True)]
    return {
        IDS: torch.tensor(ids),
        LABELS: torch.tensor(labels),
        LOSS_MASK: torch.tensor(trained, dtype=torch.float32),
    }


def _log_probs(model: LoadedModel, ids_BPS: Tensor, labels_BPS: Tensor, rows_BPSD: Tensor | None = None) -> Tensor:
    """Return the log-probability of each answer, summed over its tokens: float32 [B, P]."""
    component = model.components[COMPONENT]
    rows_NSD = None if rows_BPSD is None else rows_BPSD.flatten(0, 1)
    states_NSD = states_of(component, ids_BPS.flatten(0, 1), rows_BSD=rows_NSD)
    each_NS = token_distance(head_of(component), states_NSD, labels_BPS.flatten(0, 1))
    return -each_NS.sum(1).view(ids_BPS.shape[:2])
