"""Weights of the loss by noise level: Min-SNR and the other weightings of DDPM objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_rocm.recipe.sections import DdpmSection

MAX_SNR = 1000.0  # the first timesteps have more


def min_snr_weight(signal_B: Tensor, noise_level_B: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """Return the Min-SNR-gamma weight of each sample (arXiv 2303.09556, eq. 10, section 3.4): float32 [B].

    It is 1 if gamma is 0. With ``snr = signal**2 / noise_level**2`` the weight is ``min(snr, gamma) / snr`` for an
    epsilon loss, and ``min(snr, gamma) / (snr + 1)`` for a v loss. The formulas use the levels and not the SNR. So pure
    noise (SNR 0) is not a special case: the epsilon weight is 1 there, and the v weight is 0.
    """
    if gamma == 0:
        return torch.ones_like(signal_B)
    signal_power_B, noise_power_B = signal_B.square(), noise_level_B.square()
    if prediction_type == "v_prediction":  # signal power and noise power add up to 1
        return torch.minimum(signal_power_B, gamma * noise_power_B)
    return (gamma * noise_power_B / signal_power_B).clamp(max=1.0)


def level_weight(signal_B: Tensor, noise_level_B: Tensor, section: DdpmSection, prediction_type: str) -> Tensor:
    """Return the loss weight of each sample's noise level, float32 [B]: the product of the recipe's weightings.

    Sources: min-SNR see ``min_snr_weight``; soft min-SNR arXiv 2401.11605, section 4.3; the others as in kohya's
    sd-scripts, which limits the SNR to MAX_SNR.
    """
    predicts_velocity = prediction_type == "v_prediction"
    weight_B = min_snr_weight(signal_B, noise_level_B, section.min_snr_gamma, prediction_type)
    if gamma := section.soft_min_snr_gamma:
        signal_power_B, noise_power_B = signal_B.square(), noise_level_B.square()
        weight_B = gamma * noise_power_B / (signal_power_B + gamma * noise_power_B)  # gamma / (SNR + gamma)
        weight_B = weight_B * signal_power_B if predicts_velocity else weight_B
    if section.scale_v_pred_loss_like_noise_pred:
        weight_B = weight_B * _share(signal_B, noise_level_B)
    if section.v_pred_like_loss:
        weight_B = weight_B * (1 + section.v_pred_like_loss / _share(signal_B, noise_level_B))
    if section.debiased_estimation_loss:
        snr_B = _limited_snr(signal_B, noise_level_B)
        weight_B = weight_B / (snr_B + 1 if predicts_velocity else snr_B.sqrt())
    return weight_B


def _limited_snr(signal_B: Tensor, noise_level_B: Tensor) -> Tensor:
    """Return the signal-to-noise ratio, limited to MAX_SNR."""
    return (signal_B / noise_level_B).square().clamp(max=MAX_SNR)


def _share(signal_B: Tensor, noise_level_B: Tensor) -> Tensor:
    """Return SNR / (SNR + 1), computed from the levels."""
    snr_B = _limited_snr(signal_B, noise_level_B)
    return snr_B / (snr_B + 1)
