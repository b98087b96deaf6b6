"""The fallback chain on each machine, real optimizers on a CPU, and the settings of parameter groups."""

import math
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from plugin_cases import Cases, Mutation, Part, Refused
from torch.profiler import profile

from hwopt import api
from hwopt.hardware.detect import detect
from hwopt.hardware.device import described
from hwopt.plugin import Context, Observation, Recipe, verify
from hwopt.testing import plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.optimizer import Optimizer, import_failure, make_optimizer
from hwopt_plugins.optimizer.states import reserving_optimizer

T4 = described("T4", (7, 5), 16.0)
CPU = described("CPU", None, 32.0)
SOFTWARE = {"torch": "2.13.0", "bitsandbytes": "0.50.2", "torchao": "0.18.0"}
SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6}


def decided(hardware, name, *fallback, software=SOFTWARE):
    return Optimizer(Optimizer.Options(name=name, fallback=fallback)).probe(Context(hardware, software, None, None))


def parameters(size=64):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, size)), torch.nn.Parameter(torch.randn(size))]


def trained(name, steps=5):
    weights = parameters()
    groups = [{"params": weights[:1], "weight_decay": 0.1, **SETTINGS}, {"params": weights[1:], "weight_decay": 0.0, **SETTINGS}]
    recipe = Recipe()
    Optimizer(Optimizer.Options(name=name)).apply(recipe, None)
    optimizer = recipe.optimizer(groups)
    generator = torch.Generator().manual_seed(1)
    with profile() as profiler:
        for _ in range(steps):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    operators = Counter({event.key: event.count for event in profiler.key_averages()})
    return run_of(optimizer, operators)


def run_of(optimizer, operators=MappingProxyType({})):
    """What the evidence reads of a run."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    names = [f"weight {number}" for number in range(len(weights))]
    observation = Observation(operators=Counter(operators))
    engine = SimpleNamespace(parameters=weights, keeps_masters=False)
    model = torch.nn.ParameterDict(dict(zip(names, weights, strict=True)))
    return SimpleNamespace(optimizer=optimizer, observation=observation, engine=engine, parameter_names=names, inner_model=model)


def stepped_by_another(run):
    run.optimizer.param_groups[0]["params"].pop()


def frozen(run):
    run.engine.parameters[0].requires_grad_(False)


@pytest.mark.parametrize("lose", [stepped_by_another, frozen])
def test_evidence_names_the_tensors_that_left_the_optimizer_or_are_frozen(lose):
    run = trained("adamw_torch")
    lose(run)
    evidence = verify(Optimizer(Optimizer.Options(name="adamw_torch")), run)
    assert evidence.status == "inactive"
    assert "1 of 2 tensors are not updated: weight 0" in evidence.seen


@pytest.fixture(scope="module")
def plain():
    return trained("adamw_torch")


@pytest.fixture
def broken(monkeypatch):
    """bitsandbytes and torchao are installed and cannot be imported."""
    import_failure.cache_clear()
    for package in ("bitsandbytes", "torchao"):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    yield
    import_failure.cache_clear()


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("name", ["paged_adamw_8bit", "adamw_torch_8bit"])
def test_package_that_cannot_be_imported_falls_back_with_the_reason(name):
    here = replace(T4, compiler="g++", source="detected")
    decision = decided(here, name, "adamw_torch_fused")
    assert (decision.kind, decision.options[0].name) == ("fallback", "adamw_torch_fused")
    assert decided(replace(here, source="described"), name, "adamw_torch_fused").kind == "apply", "another machine may import it"
    assert "cannot be imported (ModuleNotFoundError: " in decision.reason


@pytest.mark.parametrize(
    ("names", "takes", "why"),
    [
        (["adamw_bnb_8bit", "adamw_torch_fused"], "adamw_torch_fused", "slow and there is no card memory to save"),
        (["paged_adamw_8bit", "adamw_torch"], "adamw_torch", "found a CPU"),
        (["adamw_torch_8bit", "adamw_torch"], "adamw_torch", "needs a C++ compiler"),
        (["paged_adamw_32bit", "paged_adamw_8bit"], "adamw_torch", "takes adamw_torch, the last candidate"),
    ],
)
def test_optimizer_that_a_cpu_cannot_run_falls_back_with_the_reason(names, takes, why):
    decision = decided(replace(CPU, compiler=None), *names)
    assert (decision.kind, decision.options[0].name) == ("fallback", takes)
    assert why in decision.reason


def test_last_candidate_is_used_although_it_is_slow():
    assert decided(CPU, "adamw_bnb_8bit").kind == "apply"
    assert "hwopt[ao]" in decided(CPU, "adamw_torch_8bit", software={"torch": "2.13.0"}).reason


def test_fused_equals_plain(plain):
    fused = trained("adamw_torch_fused")
    for a, b in zip(plain.engine.parameters, fused.engine.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    evidence = verify(Optimizer(Optimizer.Options()), fused)
    assert evidence.status == "active"
    assert "10 call(s) of the fused kernel" in evidence.seen, "two groups, five steps"


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_torch_8bit"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning", "ignore::DeprecationWarning:torch")
def test_8_bit_states_follow_plain_adamw_with_the_groups_settings(plain, name):
    start = parameters()
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its update for half a minute
        quantized = trained(name)
    moved = [(a - s).norm() for a, s in zip(plain.engine.parameters, start, strict=True)]
    apart = [(a - b).norm() for a, b in zip(plain.engine.parameters, quantized.engine.parameters, strict=True)]
    assert apart[0] < 0.1 * moved[0]
    torch.testing.assert_close(
        plain.engine.parameters[1], quantized.engine.parameters[1], rtol=1e-4, atol=1e-5
    )  # too small to be quantized
    evidence = verify(Optimizer(Optimizer.Options(name=name)), quantized)
    assert evidence.status == "active", evidence.seen
    assert "uint8" in evidence.seen or "OptimState8bit" in evidence.seen
    for group in quantized.optimizer.param_groups:
        assert float(group["lr"]) == pytest.approx(3e-3)
        assert tuple(group["betas"]) == (0.8, 0.95)
    assert [group["weight_decay"] for group in quantized.optimizer.param_groups] == [0.1, 0.0]


def quantized_step(optimizer, weights):
    """One update of `weights`, with gradients that depend on nothing but the shapes."""
    generator = torch.Generator().manual_seed(2)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return optimizer.step()


def test_bitsandbytes_without_waits_has_the_bits_of_its_own_step():
    from bitsandbytes.optim import AdamW8bit

    group = {"weight_decay": 0.1, **SETTINGS}
    ours, theirs = parameters(128), parameters(128)
    driven, plain = make_optimizer("adamw_bnb_8bit", [{"params": ours, **group}]), AdamW8bit([{"params": theirs, **group}])
    for _ in range(3):
        quantized_step(driven, ours)
        quantized_step(plain, theirs)
    assert type(driven) is not AdamW8bit, "bitsandbytes' own class is as it was"
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert driven.state[a].keys() == plain.state[b].keys()
        for key, value in driven.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(plain.state[b][key])), key
    assert type(driven).__name__ == "AdamW8bit", "the name in checkpoints"


def test_stochastic_rounding_is_on_for_torchao_only():
    card = replace(T4, compiler="g++")
    assert decided(card, "adamw_torch_8bit").options[0].stochastic_rounding is True
    assert decided(card, "adamw_bnb_8bit").options[0].stochastic_rounding is None


@pytest.fixture
def not_compiled(monkeypatch):
    """torchao's update in eager mode: the same numbers, without compiling each shape."""
    import torch._dynamo

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def updated_bf16(stochastic, steps=200):
    """A bf16 weight of 1 after steps of 1/1024 each, a quarter of its rounding unit below 1."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    groups = [{"params": [weight], "weight_decay": 0.0, **SETTINGS, "lr": 2**-10}]
    optimizer = make_optimizer("adamw_torch_8bit", groups, stochastic_rounding=stochastic)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().double().mean().item(), optimizer


@pytest.mark.usefixtures("not_compiled")
def test_stochastic_rounding_keeps_small_updates_on_average():
    nearest, _ = updated_bf16(stochastic=False)
    assert nearest == 1.0, "each update is rounded away"
    stochastic, optimizer = updated_bf16(stochastic=True)
    assert stochastic == pytest.approx(1 - 200 / 1024, abs=5e-3)
    run = run_of(optimizer)
    options = Optimizer.Options(name="adamw_torch_8bit", stochastic_rounding=True)
    evidence = verify(Optimizer(options), run)
    assert evidence.status == "active"
    assert "4,096 bf16 weights, rounded stochastically" in evidence.seen
    other = Optimizer.Options(name="adamw_torch_8bit", stochastic_rounding=False)
    assert verify(Optimizer(other), run).status == "inactive"


@pytest.mark.usefixtures("not_compiled")
def test_stochastic_rounding_resumes_with_the_same_bits(tmp_path):
    here = detect()
    hardware = replace(here, cpu_features=(*here.cpu_features, "avx512_bf16"), compiler="g++")
    tables = {"precision": {"dtype": "bf16", "level": "pure"}, "optimizer": {"name": "adamw_torch_8bit"}}
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, save_steps=2), hardware=hardware)
    recorder = train_tiny(plan, tmp_path)
    evidence = next(evidence for entry, evidence in recorder.found if entry.name == "optimizer")
    assert "rounded stochastically" in evidence.seen
    resumed = rewound(tmp_path / "run", tmp_path / "again", 2)
    api.execute(plan, resumed, cache=tmp_path / "cache", resume=True)
    assert saved_bits(resumed / "final") == saved_bits(tmp_path / "run" / "final")


def bytes_of(tensor):
    """The bytes of a tensor, and of the parts of torchao's quantized states."""
    parts = [getattr(tensor, name) for name in getattr(tensor, "tensor_attrs", ())]
    return sum(part.nbytes for part in parts) if parts else tensor.nbytes


def states_after_a_step(make, shape, dtype=torch.float32):
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = make([{"params": [weight], "lr": 1e-3}])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return optimizer.state[weight]


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (63, 65), (33, 128), (8, 256)])
def test_reserved_state_is_as_large_as_torchaos(name, dtype, shape):
    real, reserved = (
        [bytes_of(value) for value in states_after_a_step(make, shape, dtype).values() if value.ndim]
        for make in (partial(make_optimizer, name), partial(reserving_optimizer, name, False))
    )
    assert sum(reserved) == sum(real)
    assert len(real) == 2


@pytest.mark.parametrize(("cls", "name"), [("AdamW8bit", "paged_adamw_8bit"), ("AdamW32bit", "paged_adamw_32bit")])
@pytest.mark.parametrize("shape", [(63, 65), (64, 65), (311, 320), (400, 256)])
def test_states_that_bitsandbytes_never_pages_are_forecast(cls, name, shape):
    import bitsandbytes.optim

    real = states_after_a_step(getattr(bitsandbytes.optim, cls), shape)
    paged = ("state1", "state2") if math.prod(shape) >= 100_000 else ()
    on_card = {key: value.nbytes for key, value in real.items() if key.startswith(("state", "absmax")) and key not in paged}
    reserved = states_after_a_step(partial(reserving_optimizer, name, True), shape)
    assert sum(value.nbytes for value in reserved.values()) == sum(on_card.values())


def unfused_adamw(patch):
    """torch's AdamW ignores `fused`."""
    real = torch.optim.AdamW.__init__

    def init(self: torch.optim.AdamW, *args: object, fused: bool = False, **kwargs: object) -> None:
        real(self, *args, **kwargs)

    patch.setattr(torch.optim.AdamW, "__init__", init)


def states_in_32_bit(patch):
    """bitsandbytes creates states in 32 bit for every tensor."""
    from bitsandbytes.optim.optimizer import Optimizer2State

    real = Optimizer2State.__init__

    def init(self: Optimizer2State, *args: object, **kwargs: object) -> None:
        real(self, *args, **kwargs)
        self.args.min_8bit_size = 1 << 40

    patch.setattr(Optimizer2State, "__init__", init)


def states_are_not_paged(patch):
    """bitsandbytes allocates states that should be paged in the memory of the device."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    patch.setattr(Optimizer8bit, "get_state_buffer", lambda self, p, dtype=torch.float32: torch.zeros_like(p, dtype=dtype))


def torchao_states_in_32_bit(patch):
    from torchao.optim import AdamW8bit

    patch.setattr(AdamW8bit, "_subclass_zeros", staticmethod(lambda tensor, *_: torch.zeros_like(tensor)))


def some_states_in_32_bit(patch, chosen):
    """bitsandbytes creates the states of the chosen large tensors in 32 bit."""
    from bitsandbytes.optim.optimizer import Optimizer2State

    numbers, real = count(), Optimizer2State.init_state

    def init_state(self, group, parameter, gindex, pindex):
        size = self.args.min_8bit_size
        if parameter.numel() >= size and chosen(next(numbers)):
            self.args.min_8bit_size = 1 << 40
        real(self, group, parameter, gindex, pindex)
        self.args.min_8bit_size = size

    patch.setattr(Optimizer2State, "init_state", init_state)


def one_state_in_32_bit(run):
    state = next(state for state in run.optimizer.state.values() if state["state1"].dtype == torch.uint8)
    state.update({key: torch.zeros_like(state[key], dtype=torch.float32) for key in ("state1", "state2")})


def table(name):
    return f'[plugins.optimizer]\nname = "{name}"\n'


BNB, TORCHAO, PAGED = {"name": "adamw_bnb_8bit"}, {"name": "adamw_torch_8bit"}, {"name": "paged_adamw_32bit"}
WIDE = {"model_type": "bert", "vocab_size": 64, "hidden_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2}
"""bitsandbytes pages states of at least 100,000 elements."""
CASES = Cases(
    invalid=(({"stochastic_rounding": True}, "needs one of adamw_torch_8bit, adamw_torch_4bit"),),
    writes=frozenset({"optimizer"}),
    conflicts=(
        Refused("zero", table("paged_adamw_8bit") + '[plugins.zero]\nstage = 2\noffload = "optimizer"', on_card=True),
        Refused("zero", table("adamw_bnb_8bit") + '[plugins.zero]\nstage = 1\noffload = "none"'),
        Refused("fsdp", table("adamw_bnb_8bit") + "[plugins.fsdp]", on_card=True),
        Refused("fsdp", table("paged_adamw_8bit") + "[plugins.fsdp]", on_card=True),
    ),
    mutations=(
        Mutation("AdamW is not fused", unfused_adamw, "expected fused True"),
        Mutation("states stay in 32 bit", states_in_32_bit, "expected quantized True", BNB),
        Mutation("torchao quantizes nothing", torchao_states_in_32_bit, "expected quantized True", TORCHAO, compiles=True),
        Mutation("states are not paged", states_are_not_paged, "expected paged True", PAGED, {"config": WIDE}, on_cuda=True),
    ),
    parts=(Part("states in 32 bit", some_states_in_32_bit, BNB, one_state_in_32_bit),),
)
