"""The states of an optimizer: what they are, for the evidence, and one that only allocates them, for the memory planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from hwopt import plugin as hw

LEAST_QUANTIZED, LEAST_PAGED = 4096, 100_000
"""Elements of the smallest tensor whose states bitsandbytes and torchao quantize, and bitsandbytes pages."""
BITSANDBYTES_BLOCK = 256
"""Elements of an 8-bit state that share a scale."""
TORCHAO_BITS = {"adamw_torch_8bit": 8, "adamw_torch_4bit": 4}
TORCHAO_BLOCKS = {8: 256, 4: 128}
"""Bits of a state -> elements that share a scale, by default."""


def states_in_use(run: hw.RunView) -> hw.Evidence:
    """The evidence of the plugin."""
    optimizer = run.optimizer
    tensors = dict(zip(run.parameter_names, run.engine.parameters, strict=False))
    states = {name: moments for name, each in tensors.items() if (moments := moments_of(optimizer.state.get(each, {})))}
    kinds: Counter[str] = Counter()  # dtype or class of the state tensors -> number of elements
    for value in chain.from_iterable(states.values()):
        kinds[kind_of(value)] += value.numel()
    fused = run.observation.calls("_fused_adamw")
    cls = f"{type(optimizer).__module__.split('.')[0]}.{type(optimizer).__name__}"
    large = {
        "quantized": {
            name: all(kind_of(m) == "uint8" or "OptimState" in kind_of(m) for m in moments)
            for name, moments in states.items()
            if quantizable(moments, optimizer)
        },
        "paged": {
            name: all(getattr(moment, "is_paged", False) for moment in moments)
            for name, moments in states.items()
            if moments[0].numel() >= LEAST_PAGED
        },
    }
    rounding = bool(getattr(optimizer, "bf16_stochastic_round", False))
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    bf16 = sum(parameter.numel() for parameter in updated if str(parameter.dtype) == "torch.bfloat16")
    seen = f"{cls}, state {', '.join(f'{kind} x {count:,}' for kind, count in sorted(kinds.items())) or 'none'}"
    seen += f"; {fused} call(s) of the fused kernel in this step"
    for what, wanted in (("quantized", "8bit" in cls or "4bit" in cls), ("paged", "Paged" in cls)):
        if wanted:
            seen += f"; {sum(large[what].values())} of {len(large[what])} large states {what}"
            missed = [name for name, right in large[what].items() if not right]
            seen += f", not {hw.first_names(missed)}" if missed else ""
    if bf16:
        seen += f"; {bf16:,} bf16 weights, rounded {'stochastically' if rounding else 'to the nearest value'}"
    found = {"class": cls, "stochastic_rounding": rounding}
    found |= {what: frozenset(each.values()) or False for what, each in large.items()}
    if lost := not_updated(run, tensors, {*map(id, updated)}):
        return hw.Evidence.inactive(f"{seen}; {len(lost)} of {len(tensors)} tensors are not updated: {hw.first_names(lost)}")
    if not run.observation.operators and cls == "torch.AdamW":
        return hw.Evidence.unknown(f"{seen}; no operators were recorded", **found)
    return hw.Evidence.active(seen, **found, fused=fused > 0)


def not_updated(run: hw.RunView, tensors: Mapping[str, Any], updated: set[int]) -> list[str]:
    """The names of the `tensors` that left the optimizer, whose tensors have the ids `updated`, or that were frozen."""
    if run.engine.keeps_masters:  # DeepSpeed empties the optimizer's groups between steps
        return []
    frozen = {name for name, parameter in run.inner_model.named_parameters() if not parameter.requires_grad}
    return [name for name, tensor in tensors.items() if id(tensor) not in updated or name in frozen]


def moments_of(state: Mapping[str, Any]) -> list[Any]:
    """The tensors of a parameter's state with an entry for each weight, without the map of 8-bit values."""
    found = (value for key, value in state.items() if getattr(value, "ndim", 0) > 0 and not key.startswith(("qmap", "absmax")))
    return [getattr(value, "_local_tensor", value) for value in found]  # of a sharded tensor, what this rank has


def kind_of(state: Any) -> str:
    """The dtype of a state, or the class of a quantized one of torchao."""
    name = type(state).__name__
    return name if "OptimState" in name else str(state.dtype).removeprefix("torch.")


def quantizable(moments: Sequence[Any], optimizer: Any) -> bool:
    """Whether the states are large enough; torchao's have whole blocks too."""
    elements = moments[0].numel()
    return bool(elements >= LEAST_QUANTIZED and elements % getattr(optimizer, "block_size", 1) == 0)


def reserving_optimizer(name: str, on_card: bool, groups: list[dict[str, Any]]) -> Any:
    """An optimizer that only allocates what the one of this `name` allocates. `on_card`: on a CUDA device instead of a CPU."""
    import torch

    bits = TORCHAO_BITS.get(name)
    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    one_kernel = bits == 8 and on_card and torch_version >= (2, 15)

    class Reserving(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state, temporary = torchao_bytes(p, bits) if bits else (paged_bytes(p, "8bit" in name), ())
                if not self.state[p]:
                    self.state[p] = {f"reserved {number}": part for number, part in enumerate(self.reserve(p, state))}
                self.reserve(p, () if one_kernel else temporary)

        def reserve(self, like: Any, sizes: tuple[float, ...]) -> list[Any]:
            return [torch.empty(int(size), dtype=torch.uint8, device=like.device) for size in sizes]

    class Early(Reserving):
        def create_state(self) -> None:
            """As the optimizers of bitsandbytes here; the planner makes the state itself."""

    return (Reserving if bits else Early)(groups, {})


def paged_bytes(parameter: Any, quantized: bool) -> tuple[float, ...]:
    """The bytes of the tensors of both states that are never paged: those of small tensors, and the scales of quantized states.

    Source: bitsandbytes/optim/optimizer.py, `init_state` and `get_state_buffer`.
    """
    count = parameter.numel()
    quantized = quantized and count >= LEAST_QUANTIZED
    moment = () if count >= LEAST_PAGED else (count if quantized else 4 * count,)
    return (*moment, *((4 * -(-count // BITSANDBYTES_BLOCK),) if quantized else ())) * 2


def torchao_bytes(parameter: Any, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(bytes of the tensors of the two states, bytes of the temporaries of the compiled update) of torchao's AdamW.

    A quantized state has packed codes, a 32-bit scale per block and a 32-bit table of code values. The compiled update stores
    both states in fp32, and in 4 bit their codes as int64, before it packs them; Inductor of torch 2.15 makes one kernel of the
    update in 8 bit on a CUDA device, which stores nothing (torch 2.11 and 2.15, as their allocators report).
    Which tensors are quantized: torchao/optim/adam.py, `_new_buffer`.
    """
    count, scale = parameter.numel(), 4 * parameter.numel() / TORCHAO_BLOCKS[bits]
    if count < LEAST_QUANTIZED or count % TORCHAO_BLOCKS[bits]:
        return (count * parameter.element_size(),) * 2, ()
    temporary = (4 * count, scale, *((8 * count,) if bits == 4 else ()))
    return (count * bits / 8, scale, 4 * 2**bits) * 2, temporary * 2
