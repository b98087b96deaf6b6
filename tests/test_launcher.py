from __future__ import annotations

import pytest

from hwopt.errors import InputError
from hwopt.hardware import described
from hwopt.launcher import rank_and_world, refuse_contradictions

CPU = described("a CPU", None, 16)
GPU = described("a GPU", (8, 6), 8)

BARE_LAUNCH = {  # what `accelerate launch` exports without options
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_USE_DEEPSPEED": "false",
}


@pytest.mark.parametrize("mixed", ["no", "fp16", "bf16"])
def test_neutral_defaults_contradict_nothing(mixed: str) -> None:
    refuse_contradictions(BARE_LAUNCH, {"mixed_precision": mixed}, GPU)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_FSDP", "1"),
        ("ACCELERATE_USE_CPU", "true"),
    ],
)
def test_a_contradiction_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*{value}|{name}"):
        refuse_contradictions({**BARE_LAUNCH, name: value}, {"mixed_precision": "fp16"}, GPU)


def test_agreement_is_no_contradiction() -> None:
    refuse_contradictions({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}, {"mixed_precision": "bf16"}, CPU)


def test_rank_and_world() -> None:
    assert rank_and_world({}) == (0, 1)
    assert rank_and_world({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    with pytest.raises(InputError, match="whole numbers"):
        rank_and_world({"RANK": "first"})
