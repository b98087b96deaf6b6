"""Accelerate's and DeepSpeed's files: combinations that start something else than they say."""

from __future__ import annotations

from collections.abc import Iterator

from hwopt.configs.check.contract import Facts, Finding, rule
from hwopt.configs.view import View


@rule(
    "cpu-ranks",
    "error",
    words=("num_processes",),
    source="accelerate launch --cpu: one process, without a warning",
    tools=("accelerate",),
)
def cpu_ranks(view: View, facts: Facts) -> Iterator[Finding]:
    """Several processes on CPUs, of which the launcher starts one."""
    if view.is_on("use_cpu") and view.ranks > 1 and view.value("distributed_type") in ("NO", "MULTI_CPU", None):
        yield Finding(
            "num_processes",
            f"use_cpu is true with {view.ranks} processes.",
            "Without mpirun the launcher starts one process, without a warning.",
            view.line("distributed_type", "MULTI_GPU") + ", which starts CPU ranks too",
        )


@rule("offload-stage", "error", words=("zero_offload",), source="DeepSpeed: offload_param needs stage 3")
def offload_stage(view: View, facts: Facts) -> Iterator[Finding]:
    """Offloading that the ZeRO stage does not support."""
    stage, what = view.number("zero_stage"), view.value("zero_offload")
    least = {"parameters": 3, "optimizer": 1}.get(str(what))
    if stage is not None and least is not None and stage < least:
        yield Finding(
            "zero_offload",
            f"The {what} are offloaded with ZeRO stage {stage:g}; stage {least} is needed.",
            "DeepSpeed ignores the setting or stops.",
            view.line("zero_stage", least),
        )


@rule("precision-twice", "error", words=("deepspeed",), source="accelerate: deepspeed_config_file", tools=("accelerate",))
def precision_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings beside a DeepSpeed file that has them too."""
    for word in ("mixed_precision", "zero_stage", "zero_offload", "max_grad_norm", "gradient_accumulation_steps"):
        if word in view:
            yield Finding(
                word,
                f"{view.spelled(word)} is given beside a DeepSpeed file.",
                "Accelerate stops: the file of DeepSpeed must be the only place for it.",
                f"remove {view.spelled(word)}",
            )
