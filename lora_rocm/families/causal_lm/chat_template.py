"""Renders a tokenizer's chat template to the same text as ``apply_chat_template``, but within resource limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template
from transformers.utils.chat_template_utils import _alias_reasoning_fields

from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.dataset.rows.row_edge import SharedCause, fails_for_all, row_edge
from lora_rocm.errors import DataError, ModelError
from lora_rocm.families.causal_lm.special_tokens import leaves
from lora_rocm.families.causal_lm.template_limits import BoundedSandbox, Meter, metered, sandbox

Message = Mapping[str, Any]
FIX = "Change the row's messages, or set model.tokenizer to a tokenizer with another chat template."


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        name: name of the model, for messages.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        self._compiled: dict[str, Template | UnusableText] = {}

    @property
    def is_there(self) -> bool:
        return self._tokenizer.chat_template is not None

    def require_readable(self, where: str) -> None:
        """Refuse a template that cannot be compiled. ``where``: the template's file, for the error.

        Raises:
            ModelError: chat-template-fails.
        """
        found = self._tokenizer.chat_template
        for source in found.values() if isinstance(found, Mapping) else [] if found is None else [found]:
            try:
                with row_edge("The chat template cannot be compiled", FIX, fails_for_all("chat template", self._name)):
                    self._sandbox.from_string(source)
            except UnusableText as error:
                fix = "Download the tokenizer's files again, or set another tokenizer (model.tokenizer)."
                raise ModelError("chat-template-fails", error.what, where=where, fix=fix) from error

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool = False, num_letters: int | None = None
    ) -> str:
        """Render messages as text. With ``prompt``, the text ends with the generation prompt.

        ``num_letters``: length of the row in characters, which sets the limits, or None to count messages and tools.

        Raises:
            UnusableText: the tokenizer has no template, or the template fails.
        """
        if not self.is_there:
            raise SharedCause(
                "The row is a conversation, but the tokenizer has no chat template.",
                "Use the model's instruction-tuned version, or rows with prompt and completion.",
                self._missing,
            )
        with row_edge("The chat template refuses the row's messages", FIX, fails_for_all("chat template", self._name)):
            if tools and not all(isinstance(tool, dict) for tool in tools):
                raise TypeError("a tool is not a mapping")
            chat = _alias_reasoning_fields(
                [{key: value for key, value in each.items() if value is not None} for each in messages]
            )
            given = {"messages": chat, "tools": list(tools) or None, "documents": None, "add_generation_prompt": prompt}
            if num_letters is None:
                num_letters = sum(map(len, leaves([messages, tools])))
            with metered(Meter(num_letters, len(chat))):
                found = self._template(given["tools"]).render(**self._tokens, **given)
            found.encode("utf-8")  # raises if the template writes half of a surrogate pair
        return found

    def _template(self, tools: Any) -> Template:
        source = self._tokenizer.get_chat_template(None, tools)
        if source not in self._compiled:
            try:
                with row_edge("The chat template cannot be compiled", FIX, fails_for_all("chat template", self._name)):
                    self._compiled[source] = self._sandbox.from_string(source)
            except UnusableText as error:  # it is the same for each row
                self._compiled[source] = error
        found = self._compiled[source]
        if isinstance(found, UnusableText):
            raise found
        return found

    @cached_property
    def _sandbox(self) -> BoundedSandbox:
        return sandbox()

    @cached_property
    def _tokens(self) -> Mapping[str, Any]:
        """The tokenizer's special tokens by name, for use as template variables."""
        return dict(self._tokenizer.special_tokens_map)

    @property
    def _missing(self) -> DataError:
        return DataError(
            "chat-template-missing",
            "The tokenizer has no chat template, but conversations need one.",
            where=f"model.name_or_path: {self._name}",
            fix="Use the model's instruction-tuned version, or set model.tokenizer to that version's "
            "tokenizer, or use rows with prompt and completion.",
        )

    def unfit(self, begin: str) -> SharedCause:
        """Return the error for a row with an answer that does not begin with the template's generation prompt."""
        error = DataError(
            "chat-template-unfit",
            "Answers rendered by the chat template do not begin with its generation prompt, so the "
            "text to train on cannot be located.",
            where=f"chat template of {self._name}: {begin[-80:]!r}",
            fix="Set model.tokenizer to a tokenizer with another chat template, or use rows with prompt "
            "and completion.",
        )
        what = f"An answer does not begin with the chat template's generation prompt ({begin[-80:]!a})."
        return SharedCause(what, FIX, error)
