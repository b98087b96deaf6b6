"""Muon for the hidden matrices, AdamW for embeddings, the head, biases and norms.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025 (arXiv:2502.16982) for the scale that
lets both parts share AdamW's learning rate. Muon itself is torch.optim.Muon.
Hardware: any. Cost: five products of each matrix with itself per step; 4 bytes of state a matrix element instead of 8.
Numerical effect: another optimizer, so another training method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwopt.plugin import Context, Decision, Evidence, Plugin, Recipe, Relations, RunView, Stage

NOT_HIDDEN = ("embed", "lm_head", "classifier", "score", "wte", "wpe")
"""Parts of the names of matrices that are no hidden layers: Muon's authors leave these to AdamW."""


def muon_groups(named: Sequence[tuple[str, Any]], training: Any) -> list[dict[str, Any]]:
    """Two parameter groups of `named` (name, parameter): the hidden matrices with `muon` set, and the rest."""
    hidden = [(name, p) for name, p in named if p.ndim == 2 and not any(part in name for part in NOT_HIDDEN)]
    chosen = {name for name, _ in hidden}
    return [{"params": hidden, "muon": True}, {"params": [pair for pair in named if pair[0] not in chosen], "muon": False}]


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer of two: groups with `muon` step by torch.optim.Muon, the others by AdamW. They share groups and state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        muon = [group for group in self.param_groups if group["muon"]]
        other = [group for group in self.param_groups if not group["muon"]]
        self.parts: list[torch.optim.Optimizer] = []
        if muon:
            self.parts.append(torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))
        if other:
            self.parts.append(torch.optim.AdamW(other))
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Muon(Plugin):
    name = "muon"
    stage = Stage.OPTIMIZER
    effect = "method"
    relations = Relations(replaces=("optimizer",))  # the profile's own optimizer gives way: one line of the profile is enough

    def probe(self, context: Context) -> Decision:
        return Decision.apply("hidden matrices by Muon, the rest by AdamW")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.parameter_groups = muon_groups
        recipe.optimizer = MuonWithAdamW

    def evidence(self, run: RunView) -> Evidence:
        states = run.optimizer.state.values()
        by_muon = sum("momentum_buffer" in state for state in states)
        seen = f"{by_muon} of {len(run.parameter_names)} tensors have Muon's momentum, the others AdamW's two moments"
        return Evidence.active(seen) if by_muon else Evidence.inactive(seen)
