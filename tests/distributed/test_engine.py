"""The engine on one device: gradients, clipping, skipped updates, and its state."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hwopt.distributed.engine import Engine
from hwopt.plugin import Recipe

Optimizer = Callable[..., torch.optim.Optimizer]
FUSED: Optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True)  # noqa: E731
PLAIN: Optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)  # noqa: E731


def make_engine(
    optimizer: Optimizer = FUSED, max_grad_norm: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Engine:
    """An engine of a linear model whose bias is frozen."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).to(dtype)
    model[0].bias.requires_grad_(False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    made = optimizer([p for _, p in named])
    run: Any = SimpleNamespace(
        device=torch.device("cpu"),
        inner_model=model,
        optimizer=made,
        scheduler=torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step)),
        scaler=None,
        parameter_names=[name for name, _ in named],
        recipe=SimpleNamespace(masters=None, events=Recipe().events),
        training=SimpleNamespace(max_grad_norm=max_grad_norm),
        is_main=True,
        world_size=1,
        step=0,
    )
    return Engine(run)


def forward(engine: Engine, rows: Tensor) -> Tensor:
    loss: Tensor = engine.run.inner_model(rows).sum()
    return loss


def weights(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.parameters]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def step(engine: Engine, rows: Tensor) -> None:
    engine.backward(forward(engine, rows), 1 / len(rows))
    engine.update()
    engine.run.step += 1


ROWS = torch.arange(12.0).reshape(4, 3) / 10


def test_gradient_of_weighted_micro_batches_is_that_of_the_mean() -> None:
    engine, whole = make_engine(), make_engine()
    for part in (ROWS[:1], ROWS[1:]):
        engine.backward(forward(engine, part), 1 / len(ROWS))
    whole.run.inner_model(ROWS).mean().backward()
    for (name, ours), (other, theirs) in zip(engine.gradients(), whole.gradients(), strict=True):
        assert name == other
        torch.testing.assert_close(ours, theirs)


def test_frozen_parameters_are_not_trained() -> None:
    engine = make_engine()
    assert engine.names == ["0.weight", "1.weight", "1.bias"]
    before = engine.run.inner_model[0].bias.clone()
    step(engine, ROWS)
    assert torch.equal(engine.run.inner_model[0].bias, before)


@pytest.mark.parametrize("largest", [0.0, 1e-3, 1e3])
def test_gradient_is_clipped_to_the_norm_and_reported_unclipped(largest: float) -> None:
    engine = make_engine(max_grad_norm=largest)
    events: list[float] = []
    engine.on_gradients.append(lambda run: events.append(float(engine.norm_of(engine.local_gradients()))))
    stepped: list[float] = []
    update = engine._step
    engine._step = lambda: (stepped.append(float(engine.norm_of(engine.local_gradients()))), update())[1]
    step(engine, ROWS)
    assert events == [pytest.approx(float(engine.norm))]
    clips = 0 < largest < events[0]
    assert stepped == [pytest.approx(largest if clips else events[0], rel=1e-2)]
    assert all(p.grad is None for p in engine.zeroed)


@pytest.mark.parametrize("optimizer", [FUSED, PLAIN], ids=["fused", "plain"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_update_with_a_non_finite_gradient_is_left_out(optimizer: Optimizer, poison: float) -> None:
    engine = make_engine(optimizer)
    step(engine, ROWS)
    before, rate = weights(engine), engine.scheduler.get_last_lr()
    step(engine, ROWS * poison)
    assert same(weights(engine), before)
    assert not engine.update_applied()
    assert not torch.isfinite(engine.norm)
    assert engine.scheduler.get_last_lr() != rate, "the schedule advances although the update was skipped"
    step(engine, ROWS)
    assert engine.update_applied()
    assert not same(weights(engine), before)


def test_init_state_changes_no_weight() -> None:
    engine, plain = make_engine(), make_engine(PLAIN)
    before = weights(engine)
    engine.init_state()
    plain.init_state()
    assert same(weights(engine), before)
    assert all(engine.optimizer.state[p]["exp_avg"].count_nonzero() == 0 for p in engine.parameters)
    assert not plain.optimizer.state, "an optimizer without found_inf makes its state in step 1"


@pytest.mark.parametrize("optimizer", [FUSED, PLAIN], ids=["fused", "plain"])
def test_loaded_state_continues_with_the_same_bits(optimizer: Optimizer) -> None:
    whole, resumed = make_engine(optimizer), make_engine(optimizer, seed=1)
    for _ in range(2):
        step(whole, ROWS)
    state = whole.state(lambda value: value.clone())
    resumed.run.inner_model[0].bias.data.copy_(whole.run.inner_model[0].bias)  # frozen: it has no optimizer state
    resumed.run.step = 2
    resumed.load_state(state)
    assert same(weights(resumed), weights(whole))
    for engine in (whole, resumed):
        step(engine, ROWS[:2])
    assert same(weights(resumed), weights(whole))
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_snapshot_of_another_model_is_refused() -> None:
    engine = make_engine()
    snapshot = engine.snapshot(lambda value: value.clone())
    with pytest.raises(ValueError, match=r"1 parameters? .*: 1\.bias"):
        engine.restore({name: value for name, value in snapshot.items() if name != "1.bias"})
    with pytest.raises(ValueError, match=r"1\.bias"):
        engine.restore(snapshot | {"1.bias": torch.zeros(2)})


def test_norm_of_bf16_gradients_is_fp32() -> None:
    engine = make_engine(dtype=torch.bfloat16)
    for parameter in engine.parameters:
        parameter.grad = torch.randn_like(parameter)
    expected = torch.cat([gradient.double().flatten() for gradient in engine.local_gradients()]).norm()
    engine.update()
    assert engine.norm.dtype == torch.float32
    assert float(engine.norm) == pytest.approx(float(expected), rel=1e-6)
