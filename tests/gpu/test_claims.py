"""Claims of a profile for this card are measured by trials: memory by torch's allocator and by NVML, speed by the steps."""

from __future__ import annotations

import pytest
import torch

from hwopt.hardware.detect import detect
from hwopt.hardware.device import GIB
from hwopt.memory.claims import Finding, Forecast
from hwopt.planning.inputs import Inputs
from hwopt.trials.benchmark import Effort, Progress
from hwopt.trials.claims import ClaimBench

pytestmark = pytest.mark.device("any")

PROFILE = """name = "mine"
[card]
match = ["{name}"]
memory_gib = {memory}
compute_capability = "{capability}"
[tuned_for]
parameters = 2e5
max_length = 64
samples = 1000
config = {{ model_type = "bert", vocab_size = 1000, hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 2, \
intermediate_size = 128 }}
[plugins.optimizer]
name = "adamw_torch_fused"
[plugins.batch]
train = 64
"""
CLAIMS = {
    "allocator": 'what = "peak_memory_gib"\nmemory = "allocator"\nexpect = [0.001, 1]',
    "device": 'what = "peak_memory_gib"\nexpect = [0.001, 4]',
    "too much": 'what = "peak_memory_gib"\nexpect = [1000, 2000]',
    "rows": 'what = "peak_memory_gib"\nmemory = "allocator"\nexpect = [1.5, 70]\nagainst_changes = ["plugins.batch.train=1"]',
    "free": 'what = "free_memory_gib"\nexpect = [0.5]',
    "states": 'what = "optimizer_state_gib"\nexpect = [0.0005, 0.005]',
    "speed": 'what = "samples_per_second"\nexpect = [1e-6]\nagainst_changes = ["plugins.batch.train=1"]',
    "epoch": 'what = "epoch_seconds"\nexpect = [1e9]',
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """The findings of one round on this card, by name of the claim."""
    folder, machine = tmp_path_factory.mktemp("claims"), detect()
    properties = torch.cuda.get_device_properties(0)
    text = PROFILE.format(
        name=properties.name,
        memory=properties.total_memory / GIB,
        capability=f"{properties.major}.{properties.minor}",
    )
    text += "".join(f'[[claims]]\nsaid = "{name}"\nsource = "here"\n{claim}\n' for name, claim in CLAIMS.items())
    (folder / "mine.toml").write_text(text)
    inputs, name = Inputs(), str(folder / "mine.toml")
    effort = Effort(rounds=1, steps=6)
    bench = ClaimBench(inputs, machine, Forecast(inputs, folder / "cache"), folder / "trials", effort)
    bench.measure(name, Progress())
    assert not bench.failed, bench.failed
    return {finding.claim.said: finding for finding in bench.findings(name)}


@pytest.mark.filterwarnings("ignore")
def test_memory_claims_are_measured_and_judged(findings: dict[str, Finding]) -> None:
    verdicts = {name: findings[name].verdict for name in ("allocator", "device", "too much", "rows", "free")}
    assert verdicts == {
        "allocator": "confirmed",
        "device": "confirmed",
        "too much": "refuted",
        "rows": "confirmed",
        "free": "confirmed",
    }
    found = {name: finding.found for name, finding in findings.items() if finding.found is not None}
    assert all(found[name].basis == "measured" for name in verdicts)
    assert found["device"].low > found["allocator"].low, "nvidia-smi counts CUDA's context too"
    assert found["free"].low + found["device"].low == pytest.approx(detect().free_memory_gib, abs=1.0)
    assert "64 x 64 tokens" in found["device"].on


def test_states_of_the_optimizer_are_measured(findings: dict[str, Finding]) -> None:
    found = findings["states"].found
    assert found is not None
    assert found.basis == "measured"
    assert findings["states"].verdict == "confirmed", "two states of 4 bytes for each of about 170,000 parameters"


def test_speed_claims_have_a_measured_figure_and_a_verdict(findings: dict[str, Finding]) -> None:
    for name, verdict in (("speed", "confirmed"), ("epoch", "refuted")):
        found = findings[name].found
        assert found is not None
        assert found.basis == "measured"
        assert found.low > 0
        assert findings[name].verdict == verdict
