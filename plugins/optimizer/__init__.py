"""AdamW: plain or fused, with states in 32, 8 or 4 bits, or with states paged to host memory.

Memory of the two states per parameter: 8 bytes in 32 bit, 2 in 8 bit, 1 in 4 bit; torch and torchao store unquantized states in
the dtype of the weight. Tensors with fewer than 4,096 elements are not quantized. torchao also does not quantize tensors whose
size is not a multiple of its block (256 elements in 8 bit, 128 in 4 bit).

Source: AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101); 8-bit optimizers, Dettmers et al. 2022 (arXiv:2110.02861); paged
optimizers, Dettmers et al. 2023 (arXiv:2305.14314); https://github.com/pytorch/ao/tree/main/torchao/optim.
Hardware: fused needs CUDA or a CPU; paged needs CUDA (unified memory); torchao needs Triton, or a C++ compiler on a CPU.
Cost: the optimizers of bitsandbytes and torchao take no `found_inf`, so the host waits for the device once per step, and the
device then waits for the launches of the update. bitsandbytes launches a kernel per parameter: 9 ms for BERT-base on a slow core.
Paged states cost one more wait for each parameter of at least 100,000 elements, and one per step.
torchao's compiled update of a tensor needs 8 (8 bit) or 24 (4 bit) bytes per element for a moment; in 8 bit on a CUDA device none
since torch 2.15.
Numerical effect: fused changes rounding; quantized states round the update itself. torchao rounds updates of bf16 weights
stochastically, so that small updates are not lost on average.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from hwopt import plugin as hw
from hwopt.hardware.device import Support
from hwopt_plugins.optimizer.states import TORCHAO_BITS, reserving_optimizer, states_in_use

Name = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
]
OPTIMIZERS: dict[str, tuple[str, str, float]] = {
    "adamw_torch": ("torch.optim", "AdamW", 8.0),
    "adamw_torch_fused": ("torch.optim", "AdamW", 8.0),
    "adamw_bnb_8bit": ("bitsandbytes.optim", "AdamW8bit", 2 + 2 * 4 / 256),
    "paged_adamw_8bit": ("bitsandbytes.optim", "PagedAdamW8bit", 2 * 4 / 256),
    "paged_adamw_32bit": ("bitsandbytes.optim", "PagedAdamW32bit", 0.0),
    "adamw_torch_8bit": ("torchao.optim", "AdamW8bit", 2 + 2 * 4 / 256),
    "adamw_torch_4bit": ("torchao.optim", "AdamW4bit", 1 + 2 * 4 / 128),
}
"""Name -> (module, class, bytes of the two states per parameter).

Quantized states have a 32-bit scale for each block, which is never paged. The driver moves paged states to the host if the device
runs out of memory.
"""
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused")
"""Optimizers whose states have the shapes of the parameters and are updated element by element."""
SAME_AS = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",  # removed from transformers; the same update as torch's
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
}
"""Other names of these optimizers in transformers, axolotl and common scripts."""


def name_from(value: Any) -> dict[str, Any]:
    """The options for an optimizer of another tool."""
    return {"name": SAME_AS.get(str(value), value)}


def make_optimizer(name: str, groups: list[dict[str, Any]], *, stochastic_rounding: bool = False) -> Any:
    """The optimizer `name` for `groups`. Each group has its own lr, betas, eps and weight_decay."""
    module, cls, _ = OPTIMIZERS[name]
    settings = {"fused": True} if name == "adamw_torch_fused" else {}
    if stochastic_rounding:
        settings["bf16_stochastic_round"] = True
    found = getattr(import_module(module), cls)
    return (without_waits(found) if module == "bitsandbytes.optim" else found)(groups, **settings)


@cache
def without_waits(cls: Any) -> Any:
    """A subclass of the bitsandbytes optimizer `cls` with the same update, in which the host waits for paged states only.

    Its `create_state()` makes the states before step 1, so that they do not split the blocks that an evaluation needs later.

    `cls` waits for the device after each parameter. Its kernels run on the default stream, in order with those of torch. Only
    paged states need the wait: the driver moves them between host and device. Source: bitsandbytes/optim/optimizer.py.
    """
    from unittest import mock

    import torch
    from bitsandbytes.optim import optimizer as library

    step_of_library = inspect.unwrap(cls.step)  # without torch's hooks, which the subclass has already

    def step(self: Any, closure: Any = None) -> Any:
        wait = library.sync_gpu
        first = next(parameter for group in self.param_groups for parameter in group["params"])
        # the order of two streams is unknown, so on another stream the waits are needed
        always = first.is_cuda and torch.cuda.current_stream(first.device) != torch.cuda.default_stream(first.device)

        def wait_if_paged(parameter: Any) -> None:
            if always or any(getattr(value, "is_paged", False) for value in self.state.get(parameter, {}).values()):
                wait(parameter)

        with mock.patch.object(library, "sync_gpu", wait_if_paged):
            loss = step_of_library(self, closure)
        if self.is_paged and not always:
            wait(first)
        return loss

    def create_state(self: Any) -> None:
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if not self.state[parameter]:
                    self.init_state(group, parameter, number, place)

    # the name and the module of `cls`: messages and evidence name the library that updates the weights
    own = {"step": torch.no_grad()(step), "create_state": torch.no_grad()(create_state)}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": without_waits.__doc__, **own})


@cache
def import_failure(module: str) -> str:
    """Why `module` cannot be imported; "" if it can. Package metadata does not show a missing CUDA library, for example."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200].partition(chr(10))[0]}"
    return ""


def available(name: str, context: hw.Context, last: bool) -> Support:
    """Whether the optimizer `name` can run on this machine, with the reason. `last`: no other candidate is left."""
    hardware, package = context.hardware, OPTIMIZERS[name][0].split(".")[0]
    cuda = hardware.device_type == "cuda"
    if not context.has(package):
        extra = " (pip install 'hwopt[ao]')" if package == "torchao" else ""
        return Support(False, f"{package} is not installed{extra}")
    if name == "adamw_torch_fused":
        return hardware.can("fused_optimizer")
    if name.startswith("paged") and not cuda:
        return Support(False, "paging needs the unified memory of a CUDA device, found a CPU")
    if package == "bitsandbytes" and not cuda and not last:
        return Support(False, "bitsandbytes on a CPU is slow and there is no card memory to save")
    if package == "torchao" and not cuda and hardware.compiler is None:
        return Support(False, "torchao needs a C++ compiler, found none on PATH")
    here = hardware.source == "detected"  # an import takes seconds, and tells nothing about another machine
    if here and package != "torch" and (failure := import_failure(OPTIMIZERS[name][0])):
        return Support(False, f"{package} {context.software[package]} cannot be imported ({failure})")
    return Support(True, f"{package} {context.software[package]}")


class Optimizer(hw.Plugin):
    name = "optimizer"
    stage = hw.Stage.OPTIMIZER
    effect = "rounding"
    relations = hw.Relations(
        conflicts=(
            hw.Conflict(
                lacks="device_update",
                why="paged states need an update on a CUDA device, and the engine updates on the CPU; "
                'set name = "adamw_torch_fused"',
                when=lambda optimizer, engine: optimizer.name.startswith("paged"),
            ),
            hw.Conflict(
                lacks="whole_parameters",
                why="8-bit, 4-bit and paged kernels need whole tensors, and the engine steps on partitions or shards; set name = "
                '"adamw_torch_fused"',
                when=lambda optimizer, engine: optimizer.name not in ELEMENTWISE,
            ),
        )
    )
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {
        "optim": hw.Alias("name", name_from),
        "optimizer": hw.Alias("name", name_from),
    }

    class Options(hw.PluginOptions):
        name: Name = "adamw_torch_fused"
        """Name of the optimizer in transformers."""
        fallback: tuple[Name, ...] = ()
        """Tried in this order if `name` cannot run; then adamw_torch."""
        stochastic_rounding: bool | None = None
        """Round updates of bf16 weights (precision.level pure) up or down at random; only adamw_torch_8bit and
        adamw_torch_4bit can, and do by default."""

        @model_validator(mode="after")
        def require_torchao_for_stochastic_rounding(self) -> Optimizer.Options:
            if self.stochastic_rounding and not {self.name, *self.fallback} & TORCHAO_BITS.keys():
                raise ValueError(
                    f"stochastic_rounding = true needs one of {', '.join(TORCHAO_BITS)}; {self.name} rounds to nearest"
                )
            return self

    options: Options

    @property
    def traits(self) -> hw.Traits:
        return hw.Traits(elementwise=self.options.name in ELEMENTWISE, per_parameter=True)

    def probe(self, context: hw.Context) -> hw.Decision:
        # a name given with --set may also be one of the profile's fallbacks
        chain = list(dict.fromkeys((self.options.name, *self.options.fallback)))
        refused: list[str] = []
        for place, name in enumerate(chain):
            capability = available(name, context, last=place == len(chain) - 1)
            if capability:
                break
            refused.append(f"{name}: {capability.reason}")
        else:
            name = "adamw_torch"
        rounding = self.options.stochastic_rounding is not False if name in TORCHAO_BITS else None
        update = {"name": name, "stochastic_rounding": rounding} | ({"fallback": ()} if refused else {})
        to = self.options.changed(**update)
        if refused:
            takes = name if capability else f"{name}, the last candidate"
            return hw.Decision.fallback(to, f"{'; '.join(refused)}; takes {takes}")
        return hw.Decision.apply(f"{name}: {capability.reason}", to)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.optimizer = partial(make_optimizer, self.options.name, stochastic_rounding=bool(self.options.stochastic_rounding))

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        name = self.options.name
        stepped_bytes = spec.master_bytes or spec.gradient_bytes  # torch's states have the dtype of the stepped tensors
        spec.state_bytes = 2 * stepped_bytes if name in ELEMENTWISE else OPTIMIZERS[name][2]
        if name.startswith("paged") or name in TORCHAO_BITS:  # fake tensors cannot run their kernels
            spec.stand_ins["optimizer"] = partial(reserving_optimizer, name, context.hardware.device_type == "cuda")

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """Paged 8-bit, 8-bit and 32-bit states, and the present optimizer between them."""
        now: Name = "adamw_torch" if options is None else options.name
        offers: dict[Name, tuple[float, str]] = {
            "paged_adamw_8bit": (1.1, "8-bit states, paged to host memory if the device runs out of memory"),
            "adamw_bnb_8bit": (1.02, "quantizes the optimizer states to 8 bit"),
            "adamw_torch_fused": (1.0, "32-bit states, all parameters in one kernel"),
        }
        if not context.hardware.can("offload"):
            offers.pop("paged_adamw_8bit")
        others = (name for name in offers if OPTIMIZERS[name][2] != OPTIMIZERS[now][2])
        names = sorted((now, *others), key=lambda name: OPTIMIZERS[name][2])
        time_and_note = {name: offers.get(name, (1.0, "")) for name in names}
        choices = (hw.Choice(changes={"name": name}, note=note, time=time) for name, (time, note) in time_and_note.items())
        return [hw.Scale(choices=tuple(choices), present=names.index(now))]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        found: hw.Evidence = states_in_use(run)
        return found

    def expects(self) -> Mapping[str, Any]:
        name = self.options.name
        module, cls, _ = OPTIMIZERS[name]
        expected: dict[str, Any] = {
            "class": f"{module.split('.')[0]}.{cls}",
            "quantized": name.endswith(("8bit", "4bit")),
            "paged": name.startswith("paged"),
            "stochastic_rounding": bool(self.options.stochastic_rounding),
        }
        return expected | ({"fused": True} if name == "adamw_torch_fused" else {})
