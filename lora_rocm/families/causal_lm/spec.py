"""Specification of language models, importable without torch: recipe sections and names."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lora_rocm.families.spec import Axes, Axis, FamilySpec, FileMetadata
from lora_rocm.recipe.rule import RecipeRule, no_effect
from lora_rocm.recipe.sections import InputFolder, ModelSection, ObjectiveSection, PathOrHubId

TOKENS_MULTIPLE = 64


class CausalLMSection(ModelSection):
    """The base model. A language model that writes the next token (Llama, Qwen, Gemma, Mistral, Phi, gpt-oss, ...)."""

    part_keys: ClassVar[tuple[str, ...]] = ("tokenizer",)

    family: Literal["causal-lm"] = Field("causal-lm", description="Model family: the architecture of the base model.")
    name_or_path: PathOrHubId = Field(
        description="A folder with config.json, tokenizer and .safetensors files, as transformers saves them, or a "
        "hub id."
    )
    tokenizer: InputFolder | None = Field(None, description="Folder of another tokenizer, with its chat template.")


class LanguageSection(ObjectiveSection):
    """The training objective of language models: the cross-entropy of the next token, or preferences (DPO)."""

    loss: Literal["cross-entropy", "dpo"] = Field(
        "cross-entropy",
        description="cross-entropy: cross-entropy of the next token. dpo: direct preference optimisation "
        "(arXiv 2305.18290) relative to the model at the start of training, from tables with the "
        "columns chosen and rejected.",
    )
    train_on: Literal["answers", "last-turn", "all"] = Field(
        "answers",
        description="answers: the assistant's messages in conversations, and the completions of prompts; last-turn: "
        "only the last answer of a conversation; all: every token. Plain texts are trained on as a whole. dpo always "
        "trains on answers.",
    )
    beta: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        0.1,
        description="For dpo: how strongly training keeps the model near its initial state; smaller values "
        "allow larger changes.",
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = Field(
        0.0,
        description="For dpo: the assumed share of pairs with swapped answers (cDPO, ericmitchell.ai/cdpo.pdf).",
    )

    @property
    def compares_pairs(self) -> bool:
        return self.loss == "dpo"

    @property
    def watching(self) -> ObjectiveSection:
        return LanguageSection() if self.compares_pairs else self


LOSS = "objective.loss"
RULES: tuple[RecipeRule, ...] = (
    no_effect(
        "objective.train_on",
        (LOSS,),
        lambda loss: loss == "dpo",
        "with loss: dpo, which trains on answers",
        "Remove it.",
    ),
    *(
        no_effect(
            f"objective.{name}",
            (LOSS,),
            lambda loss: loss != "dpo",
            "with loss: {1}",
            "Remove it, or set loss: dpo.",
        )
        for name in ("beta", "label_smoothing")
    ),
    RecipeRule(
        "pairs-are-not-packed",
        ("data.packing", LOSS),
        lambda packing, loss: packing and loss == "dpo",
        "pairs of answers cannot be packed into rows",
        "Remove it.",
        at="data.packing",
    ),
)

SPEC = FamilySpec(
    name="causal-lm",
    title="language models",
    model_section=CausalLMSection,
    objective_section=LanguageSection,
    implementation="lora_rocm.families.causal_lm.family:CausalLM",
    component="model",
    axes=Axes((Axis("tokens", unit="tokens", multiple=TOKENS_MULTIPLE),)),
    samples=("text",),
    preview="text",
    fp16="never",
    metadata=FileMetadata(rate="", text_rate=""),
    formats=("peft",),
    conversions=("merged", "gguf"),
    rules=RULES,
)
