"""Equal bits to the usual update, few gradients at a time, non-finite gradients, and what the plugin refuses."""

from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_cases import Cases, Chosen, Mutation, Part, Refused

from hwopt.errors import InputError
from hwopt.hardware.detect import detect
from hwopt.memory.forecast.planner import plan_memory
from hwopt.planning.plan import Plan
from hwopt.plugin import Recipe
from hwopt.testing import TINY_LLAMA, Recorder, plan_for, saved_bits, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.optimizer_in_backward.engine import InBackwardEngine

WITH: dict[str, Any] = {"optimizer_in_backward": {}}
ONE = {"batch": {"train": 8}}


def plan_with(folder: Path, tables: dict[str, Any], kind: str = "text-classification", **options: Any) -> Plan:
    """A plan without clipping, whose steps have one micro-batch, unless `options` or `tables` say otherwise."""
    training = {"max_grad_norm": 0.0} | options.pop("training", {})
    job = tiny_job(folder, kind, config=options.pop("config", None), **training)
    return plan_for(tiny_profile(**(ONE | tables)), job, **options)


def trained(folder: Path, tables: dict[str, Any], *arguments: Any, **options: Any) -> tuple[Recorder, dict[str, str]]:
    """The recorder of a run, and the bits of its final weights."""
    recorder = train_tiny(plan_with(folder, tables, *arguments, **options), folder)
    return recorder, saved_bits(folder / "run" / "final")


@pytest.mark.parametrize(
    ("tables", "kind", "config"),
    [
        ({"optimizer": {"name": "adamw_torch_fused"}}, "text-classification", None),
        ({"optimizer": {"name": "adamw_bnb_8bit"}}, "text-classification", None),
        ({"checkpointing": {}}, "causal-lm", TINY_LLAMA | {"tie_word_embeddings": True}),
        ({"precision": {"dtype": "bf16", "level": "pure"}, "fused_loss": {}}, "causal-lm", TINY_LLAMA),
    ],
    ids=["fused", "8-bit", "tied-checkpointing", "pure-fused-loss"],
)
def test_update_in_backward_equals_the_usual_one_bit_for_bit(
    tables: dict[str, Any], kind: str, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    usual, usual_bits = trained(tmp_path / "usual", tables, kind, config=config)
    recorder, bits = trained(tmp_path / "in_backward", tables | WITH, kind, config=config)
    assert isinstance(recorder.run.engine, InBackwardEngine)
    assert recorder.losses == usual.losses
    assert [row.get("grad_norm") for row in recorder.rows] == [row.get("grad_norm") for row in usual.rows]
    assert bits == usual_bits
    evidence = next(evidence for entry, evidence in recorder.found if entry.name == "optimizer_in_backward")
    assert evidence.status == "active"
    count = len(recorder.run.engine.parameters)
    assert f"{count} of {count} parameters were updated in the backward pass of this step; 0 after it" in evidence.seen


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def make_engine(clip: bool = False, max_grad_norm: float = 0.0, optimizer: Any = fused_adamw) -> InBackwardEngine:
    """An engine of three linear layers; its loss is the sum of the outputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    made = optimizer(model.parameters())
    run: Any = SimpleNamespace(
        device=torch.device("cpu"),
        inner_model=model,
        model=None,
        optimizer=made,
        scheduler=torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0),
        scaler=None,
        accelerator=SimpleNamespace(prepare_model=lambda model, evaluation_mode: model),
        parameter_names=[name for name, _ in model.named_parameters()],
        recipe=SimpleNamespace(masters=None, events=Recipe().events),
        training=SimpleNamespace(max_grad_norm=max_grad_norm),
    )
    return InBackwardEngine(run, clip=clip)


def step(engine: InBackwardEngine, inputs: torch.Tensor) -> None:
    engine.in_step = True
    engine.backward(engine.run.model(inputs).sum(), 1.0)
    engine.update()


def weights(engine: InBackwardEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.parameters]


def changed(engine: InBackwardEngine, before: list[torch.Tensor]) -> list[bool]:
    return [not torch.equal(now, then) for now, then in zip(engine.parameters, before, strict=True)]


def test_one_gradient_exists_at_a_time() -> None:
    engine, alive = make_engine(), []
    for parameter in engine.parameters:  # these hooks run after the engine's
        parameter.register_post_accumulate_grad_hook(lambda _: alive.append(sum(p.grad is not None for p in engine.parameters)))
    step(engine, torch.ones(2, 4))
    assert alive == [0, 0, 0]
    assert engine.updated == 3


@pytest.mark.parametrize("optimizer", [fused_adamw, partial(torch.optim.SGD, lr=0.1)], ids=["found_inf", "without"])
def test_non_finite_loss_changes_no_weight(optimizer: Any) -> None:
    engine = make_engine(optimizer=optimizer)
    step(engine, torch.ones(2, 4))
    before = weights(engine)
    step(engine, torch.full((2, 4), torch.inf))
    assert not any(changed(engine, before))
    assert not engine.update_applied()
    assert not torch.isfinite(engine.norm)
    step(engine, torch.ones(2, 4))
    assert engine.update_applied()
    assert all(changed(engine, before))


def test_updates_after_a_non_finite_gradient_are_skipped() -> None:
    engine = make_engine()
    step(engine, torch.ones(2, 4))
    before = weights(engine)
    engine.parameters[1].register_hook(lambda gradient: gradient * torch.inf)  # the backward pass goes from layer 2 to layer 0
    step(engine, torch.ones(2, 4))
    assert changed(engine, before) == [False, False, True]
    assert not engine.update_applied()


def test_backward_outside_of_a_step_changes_no_weight_and_leaves_no_gradient() -> None:
    engine = make_engine()
    before = weights(engine)
    engine.backward(engine.run.model(torch.ones(2, 4)).sum(), 1.0)
    assert not any(changed(engine, before))
    assert all(parameter.grad is None for parameter in engine.parameters)


def test_clipping_by_parameter_limits_each_norm() -> None:
    seen: list[float] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(float(p.grad.norm()) for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    engine = make_engine(clip=True, max_grad_norm=0.5, optimizer=partial(Watching, lr=0.1))
    step(engine, torch.ones(2, 4))
    assert seen == [pytest.approx(0.5, rel=1e-4)] * 3


def test_plan_refuses_clipping_unless_told(tmp_path: Path) -> None:
    clipped = {"training": {"max_grad_norm": 0.7}}
    message = r"cannot clip by the norm of all parameters \(training\.max_grad_norm = 0\.7\)"
    with pytest.raises(InputError, match=message):
        plan_with(tmp_path, WITH, **clipped)
    for clipping in ("off", "parameter"):
        plan = plan_with(tmp_path, {"optimizer_in_backward": {"clipping": clipping}}, **clipped)
        assert plan.method["plugins.optimizer_in_backward.clipping"] == clipping
    assert "plugins.optimizer_in_backward" not in plan_with(tmp_path, WITH).method, "without clipping it changes no bit"


def test_plan_refuses_a_step_of_several_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs one micro-batch per step.*Set plugins\.batch\.train = 8"):
        plan_with(tmp_path, WITH | {"batch": {"train": 3, "effective": 8}})


def test_forecast_has_no_gradients_beside_the_weights(tmp_path: Path) -> None:
    wide = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    tables = {"sdpa": {}, "batch": {"train": 1}, "optimizer": {"name": "adamw_torch_fused"}}
    usual, in_backward = (
        plan_memory(plan_with(tmp_path, tables | more, "causal-lm", config=wide, hardware=detect()), tmp_path / "cache")
        for more in ({}, WITH)
    )
    assert usual.tier == in_backward.tier == "traced"
    weights_gib = usual.parts["weights"]
    assert usual.parts["gradients"] == pytest.approx(weights_gib, rel=0.01)
    assert usual.peak_gib - in_backward.peak_gib > 0.7 * weights_gib


def no_hooks(patch: pytest.MonkeyPatch) -> None:
    """torch never calls the hooks of a complete gradient."""
    patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", lambda self, hook: None)


def some_hooks(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """torch does not call the hooks of the chosen parameters."""
    numbers, real = count(), torch.Tensor.register_post_accumulate_grad_hook
    patch.setattr(
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        lambda self, hook: None if chosen(next(numbers)) else real(self, hook),
    )


def remove_half(run: Any) -> None:
    for parameter in run.engine.parameters[::2]:
        parameter._post_accumulate_grad_hooks.clear()


OFF = {"clipping": "off"}
TABLE = '[plugins.optimizer_in_backward]\nclipping = "off"'
CASES = Cases(
    options=OFF,
    beside={"batch": {"train": 8}},
    writes=frozenset({"engine", "events"}),  # on one rank
    conflicts=(
        Refused("precision", f'[plugins.precision]\ndtype = "fp16"\n{TABLE}', world_size=1, on_card=True),
        Refused("length_batching", f"[plugins.length_batching]\n{TABLE}", world_size=1),
    ),
    mutations=(Mutation("the hooks are never called", no_hooks, "0 of", OFF),),
    parts=(Part("parameters updated after the backward pass", some_hooks, OFF, remove_half),),
)
