"""Optimizer groups: which parameters weight decay may touch."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups in which spectra, norms and biases have no weight decay.

    Decay pulls a parameter to zero, which is no neutral place for a spectrum: raw values of zero
    are omega 1 and zeta 0.69. A module names such parameters in its attribute `no_weight_decay`.

    Args:
        module: A module; parameters that need no gradient are left out, shared ones occur once.
        weight_decay: Decay of the first group.

    Returns:
        Two groups for any `torch.optim` optimizer: with the decay, and without any.

    Example:
        >>> groups = parameter_groups(nn.Linear(2, 3), weight_decay=0.01)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.01), (1, 0.0)]
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay must not be negative; got {weight_decay}")
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        exempt = getattr(owner, "no_weight_decay", ())
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            is_spared = isinstance(owner, _NORMS) or name.endswith("bias") or name in exempt
            (spared if is_spared else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
