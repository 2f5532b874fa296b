"""The cross-entropy of the next token, without the logits of a whole batch, and the loss of pairs of answers.

Logits are made of some tokens at a time, in float32, and made again in the backward pass (arXiv 1604.06174).
Dimensions: B batch, S tokens, D width, N tokens of a batch, V vocabulary, P the two answers of a pair (the chosen one
first).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.checkpoint import checkpoint

from lora_rocm.families.objectives.base import Draws

IGNORED = -100
AT_ONCE = 1024


class NextToken:
    """Implements ``Objective``: nothing is drawn."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        return Draws({})

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        return Draws({})


def token_distance(
    head: Callable[[Tensor], Tensor], states_BSD: Tensor, labels_BS: Tensor, at_once: int = AT_ONCE
) -> Tensor:
    """The cross-entropy of each token: float32 [B, S]; 0 where the label is ``IGNORED``.

    Args:
        head: maps last hidden states [N, D] to logits [N, V] in float32.
        states_BSD: last hidden states, in the dtype of the head.
        labels_BS: the next token of each place.
        at_once: number of tokens whose logits exist at once.
    """

    def each(states_ND: Tensor, labels_N: Tensor) -> Tensor:
        return cross_entropy(head(states_ND), labels_N, ignore_index=IGNORED, reduction="none")

    parts = zip(states_BSD.flatten(0, 1).split(at_once), labels_BS.flatten().split(at_once), strict=True)
    found = [checkpoint(each, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(found).view(labels_BS.shape)


@dataclass(frozen=True)
class Preference:
    """Direct preference optimisation: the chosen answer should gain on the rejected one.

    Source: arXiv 2305.18290, equation 7; with label smoothing ericmitchell.ai/cdpo.pdf, equation 3.
    """

    beta: float
    label_smoothing: float

    def margin(self, log_probs_BP: Tensor, start_BP: Tensor) -> Tensor:
        """By how much the reward of the chosen answer is higher: float32 [B].

        Args:
            log_probs_BP: log-probability of each answer, summed over its tokens.
            start_BP: the same of the model as training starts.
        """
        gained_BP = log_probs_BP - start_BP
        return self.beta * (gained_BP[:, 0] - gained_BP[:, 1])

    def distance(self, log_probs_BP: Tensor, start_BP: Tensor) -> Tensor:
        """The loss of each pair: float32 [B, 1]. For arguments see ``margin``."""
        margin_B, wrong = self.margin(log_probs_BP, start_BP), self.label_smoothing
        return -((1 - wrong) * logsigmoid(margin_B) + wrong * logsigmoid(-margin_B))[:, None]
