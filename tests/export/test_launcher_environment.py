import json
from pathlib import Path
from typing import Any

import pytest

from hwopt.errors import InputError
from hwopt.export.accelerate import refuse_contradictions
from hwopt.hardware.device import described

CPU = described("a CPU", None, 16)
GPU = described("a GPU", (8, 6), 8)

# fmt: off
BARE_LAUNCH = {  # what `accelerate launch` sets without options
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_USE_CPU": "False", "ACCELERATE_USE_DEEPSPEED": "false",
}
EXPORTS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": 2, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": False, "ACCELERATE_GRADIENT_CLIPPING": 1.0, "FSDP_OFFLOAD_PARAMS": True,
}
# fmt: on


def test_what_a_launcher_sets_by_itself_is_accepted() -> None:
    """Equal settings: tests/export/test_exports.py, with those that the launcher makes of exported files."""
    by_use_fsdp = {"FSDP_OFFLOAD_PARAMS": "false"}
    refuse_contradictions(BARE_LAUNCH | by_use_fsdp, {"mixed_precision": "fp16"}, GPU, EXPORTS)


@pytest.mark.parametrize(
    ("name", "value", "planned"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "fp16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "no"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "1"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "false"),
        ("ACCELERATE_USE_CPU", "true", "false"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0", "2"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "none"),
        ("FSDP_OFFLOAD_PARAMS", "maybe", "true"),
    ],
)
def test_contradiction_shows_the_variable_and_both_values(name: str, value: str, planned: str) -> None:
    with pytest.raises(InputError, match=f"{name}={value} contradicts the plan, in which it is {planned}"):
        refuse_contradictions({**BARE_LAUNCH, name: value}, {"mixed_precision": "fp16"}, GPU, EXPORTS)


CONFIG = {"train_batch_size": 6, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@pytest.mark.parametrize(
    "content",
    [
        {},
        CONFIG,
        {"train_batch_size": "auto", "gradient_clipping": 1, "steps_per_print": 100},
        {"fp16": {"enabled": False, "loss_scale_window": 1000}, "zero_optimization": {"offload_optimizer": {"device": "none"}}},
    ],
)
def test_matching_deepspeed_file_is_accepted(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(content))
    refuse_contradictions({FILE: str(tmp_path / "ds.json")}, {}, CPU, {FILE: CONFIG})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"zero_optimization": {"stage": 3}}', "zero_optimization.stage is 3, which contradicts the plan, in which it is 2"),
        ('{"bf16": {"enabled": false}}', "bf16.enabled is False, .* in which it is true"),
        ('{"optimizer": {"type": "Adam"}}', "optimizer.type is 'Adam', .* this key does not exist"),
        ("[]", "cannot be read as JSON .expected a JSON object"),
        (None, "cannot be read as JSON .*no such file"),
    ],
)
def test_contradicting_deepspeed_file_is_refused(text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    with pytest.raises(InputError, match=f"{FILE}=.*ds.json.*{expected}"):
        refuse_contradictions({FILE: str(tmp_path / "ds.json")}, {}, CPU, {FILE: CONFIG})
