"""Cross-entropy of tokens. Its gradient overwrites the logits, to save memory.

Dimensions: N tokens, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Implementation


@torch.no_grad()
def to_loss_gradient(
    logits_NV: Tensor,
    labels_N: Tensor,
    ignored: int,
    implementation: Implementation,
    scale: float = 1.0,
    cap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of each token, float32 [N], and overwrite the logits with their gradient.

    The softmax is taken of ``scale * logits``, or with a cap of ``cap * tanh(scale * logits / cap)``. Everything is
    computed in float32.

    Args:
        logits_NV: logits, contiguous.
        labels_N: int64, the target token of each row. Loss and gradient are 0 where it is ``ignored``.
        ignored: a negative number.
        implementation: see ``backend``.
        scale: factor of the logits.
        cap: limit on the magnitude of the logits, or None.
    """
    kernel = f"token_loss.to_loss_gradient: {'no cap' if cap is None else 'cap'}"
    implementation = backend.decided(implementation, lambda: kernel)
    if backend.launches(implementation, logits_NV, lambda: kernel):
        from lora_rocm.kernels.token_loss_triton import launch

        return launch(logits_NV, labels_N, ignored, scale, cap)
    if implementation == "triton":  # on the meta device, the kernel overwrites the logits and allocates the losses
        return torch.empty_like(labels_N, dtype=torch.float32)
    capped_NV = logits_NV.float() * scale
    slope: Tensor | float = scale
    if cap is not None:
        bent_NV = torch.tanh(capped_NV / cap)
        capped_NV, slope = bent_NV * cap, scale * (1 - bent_NV.square())
    counts_N1, at_N1 = (labels_N != ignored)[:, None], labels_N.clamp(min=0)[:, None]
    likely_NV = torch.log_softmax(capped_NV, dim=1)
    losses_N = torch.where(counts_N1, -likely_NV.gather(1, at_N1), 0.0)[:, 0]
    gradient_NV = likely_NV.exp_().scatter_add_(1, at_N1, -torch.ones_like(at_N1, dtype=torch.float32))
    logits_NV.copy_(gradient_NV.mul_(slope).mul_(counts_N1))
    return losses_N
