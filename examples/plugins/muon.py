"""Muon for the hidden matrices, AdamW for embeddings, the head, biases and norms.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025 (arXiv:2502.16982) for the scale that
lets both parts share AdamW's learning rate. Muon itself is torch.optim.Muon.
Hardware: any. Cost: five products of each matrix with itself per step; 4 bytes of state a matrix element instead of 8.
Numerical effect: another optimizer, so another training method.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hwopt.plugin import Context, Decision, Evidence, Plugin, Recipe, Relations, RunView, Stage

NOT_HIDDEN = ("embed", "lm_head", "classifier", "score", "wte", "wpe")
"""Parts of the names of matrices that are not hidden layers: Muon's authors leave these to AdamW."""


def muon_groups(named: Sequence[tuple[str, Any]], training: Any) -> list[dict[str, Any]]:
    """Two parameter groups of `named` (name, parameter): the hidden matrices with `muon` set, and the rest."""
    groups: list[dict[str, Any]] = [{"params": [], "muon": False}, {"params": [], "muon": True}]
    for name, p in named:
        groups[p.ndim == 2 and not any(part in name for part in NOT_HIDDEN)]["params"].append((name, p))
    return groups


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer of two: groups with `muon` step by torch.optim.Muon, the others by AdamW. They share groups and state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        makers = {True: partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), False: torch.optim.AdamW}
        by_maker = {muon: [group for group in self.param_groups if group["muon"] == muon] for muon in makers}
        self.parts: list[Any] = [makers[muon](found) for muon, found in by_maker.items() if found]
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
        by_muon = sum("momentum_buffer" in state for state in run.optimizer.state.values())
        hidden = sum(len(group["params"]) for group in run.optimizer.param_groups if group["muon"])
        seen = f"{by_muon} of {hidden} hidden matrices have Muon's momentum"
        return Evidence.of(by_muon == hidden > 0, seen)
