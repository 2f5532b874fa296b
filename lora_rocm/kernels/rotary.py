"""RMSNorm of each head of queries or keys (arXiv 1910.07467), then rotary position embedding (arXiv 2104.09864).

Dimensions: B batch, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Form
from lora_rocm.kernels.norms import rms_normal


@dataclass(frozen=True)
class Rotation:
    """An angle for each token and each pair of numbers of a head, all float32.

    cos, sin: [S, D/2] or [B, S, D/2], the same for all heads.
    interleaved: a pair is neighbouring numbers; otherwise number i of the first half with number i of the second.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True)
class Heads:
    """Queries or keys of one stream of tokens.

    x: [B, S, H, D].
    weight: [D], of the RMSNorm; frozen.
    """

    x: Tensor
    weight: Tensor
    eps: float


def norm_rotary(streams: Sequence[Heads], rotation: Rotation, form: Form) -> Tensor:
    """Normalise and rotate the heads of streams whose tokens follow one another.

    Only each ``x`` and the rotation are kept for the backward pass.

    Returns:
        [B, S, H, D], contiguous, in the dtype of the first ``x``; S is the sum over all streams.
    """
    if backend.launches(form, streams[0].x):
        from lora_rocm.kernels.rotary_triton import TritonNormRotary

        given = [part for stream in streams for part in (stream.x, stream.weight)]
        turned: Tensor = TritonNormRotary.apply(
            rotation.cos, rotation.sin, rotation.interleaved, streams[0].eps, *given
        )
        return turned
    normal = torch.cat([rms_normal(stream.x, stream.eps) * stream.weight for stream in streams], dim=1)
    cos, sin = rotation.cos.unsqueeze(-2), rotation.sin.unsqueeze(-2)
    if rotation.interleaved:
        a, b = normal.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = normal.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.to(normal.dtype)
