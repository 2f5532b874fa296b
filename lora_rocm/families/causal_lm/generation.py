"""Generates answers token by token. Dimensions: V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lora_rocm.families.base import Sampling
from lora_rocm.families.causal_lm.architecture import decoder, head_of

UNFINISHED = "\ufffd"
"""The character to which the tokenizer decodes the bytes of an incomplete character."""


@torch.no_grad()
def next_tokens(
    model: nn.Module, ids: Sequence[int], sampling: Sampling, ends: Collection[int]
) -> Generator[int, None, str]:
    """Yield the tokens that a model generates after ``ids``, without the end token.

    Args:
        model: the model, in eval mode.
        ids: tokens of the prompt.
        sampling: settings for sampling tokens; ``max_tokens`` may exceed the model's positions.
        ends: ids of the tokens that end an answer.

    Returns:
        The reason for the end: "end", or "limit" if the maximum number of tokens is reached.
    """
    inside, head = decoder(model), head_of(model)
    device = next(head.layer.parameters()).device
    cache, rng = DynamicCache(config=inside.config), torch.Generator().manual_seed(sampling.seed)
    places = places_of(model)
    count = sampling.max_tokens if places is None else min(sampling.max_tokens, places - len(ids))
    fed = [*ids]
    for _ in range(count):
        ids_BS = torch.tensor([fed], device=device)
        states_BSD = inside(input_ids=ids_BS, past_key_values=cache, use_cache=True).last_hidden_state
        token = chosen(head(states_BSD[:, -1])[0], sampling, rng)
        if token in ends:
            return "end"
        yield token
        fed = [token]
    return "limit"


def chosen(logits_V: Tensor, sampling: Sampling, rng: torch.Generator) -> int:
    """Return the next token, sampled on the CPU from the most likely tokens with a total probability of ``top_p``.

    At temperature 0, the most likely token is returned.
    """
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # on the CPU, so that a seed gives the same draws on every device
    shares_V, order_V = (logits_V.float().cpu() / sampling.temperature).softmax(0).sort(descending=True, stable=True)
    before_V = shares_V.cumsum(0) - shares_V
    kept_V = torch.where(before_V < sampling.top_p, shares_V, 0.0)
    return int(order_V[torch.multinomial(kept_V, 1, generator=rng)])


def places_of(model: nn.Module) -> int | None:
    """Return the maximum number of tokens that a model can read, or None if its config does not specify it."""
    whole: Any = model
    places: int | None = getattr(whole.config.get_text_config(), "max_position_embeddings", None)
    return places


def pieces_of(tokens: Generator[int, None, str], tokenizer: Any) -> Generator[str, None, str]:
    """Yield the text of each token, or "" while a character is incomplete.

    Returns:
        The result of the generator ``tokens``, which is the reason for the end.
    """
    written, said = list[int](), ""
    while True:
        try:
            written.append(next(tokens))
        except StopIteration as last:
            text = str(tokenizer.decode(written, skip_special_tokens=True))
            if text != said:
                yield text[len(said) :]
            return str(last.value)
        text = str(tokenizer.decode(written, skip_special_tokens=True))
        whole = "" if text.endswith(UNFINISHED) or not text.startswith(said) else text[len(said) :]
        said += whole
        yield whole
