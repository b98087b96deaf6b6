"""`hwopt.session` in a bare loop and `hwopt.Accelerator`: the losses and norms of the script without them."""

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from hosts.scripts import Steps, arguments, bert, farthest, llama, memory_of, padded, reset, rows
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import Trainer

import hwopt
from hwopt.errors import InputError, PluginError
from hwopt.hardware.device import described
from hwopt.hardware.layer_speed import LayerSpeed
from hwopt.hosts.script_plan import Script, plan_for
from hwopt.hosts.script_run import ScriptRun

SPLIT: dict[str, Any] = {"precision": False, "batch": {"train": 4}}
WHOLE: dict[str, Any] = {"precision": False, "batch": {"train": 16}}
TOKENS = 400
"""A micro-batch of more of them runs out of memory: every step of 16 rows does."""
CLOSE = 1e-6


def batches(size: int = 16, classes: bool = True) -> list[dict[str, Any]]:
    data = rows()
    return [padded(data[begin : begin + size], classes) for begin in range(0, len(data), size)]


def bare(
    limit: int | None = None, session: dict[str, Any] | None = None, make: Callable[[], Any] = bert, followed: bool = False
) -> Steps:
    """A loop of torch alone; `session`: the arguments of `hwopt.session` around it. `followed`: the loop makes the optimizer."""
    model, found = make(), []

    def loss_of(inputs: Any) -> Any:
        return model(**inputs).loss

    def train(optimizer: Any, own: Any) -> None:
        for batch in batches(classes=type(model).__name__.startswith("Bert")):
            if own is None:
                loss = loss_of(batch)
                loss.backward()
            elif limit:
                loss = own.accumulate(batch, loss_of)
            else:
                parts = [(loss_of(micro.inputs) * micro.weight) for micro in own.micro_batches(batch)]
                for part in parts:
                    part.backward()
                loss = sum(parts)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))

    if limit:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if session is None:
        train(mine, None)
        return found
    with hwopt.session("cpu", model, rows=16, **session) as own:
        if followed:
            own.follow(mine)
        train(mine if followed else own.optimizer(model.parameters(), lr=1e-3), own)
    return found


def accelerated(cls: type, split: bool = False, limit: int | None = None, early: bool = False, **settings: Any) -> Steps:
    """accelerate's own example in short: a loop with `prepare`, `backward`, `clip_grad_norm_` and a schedule."""
    reset()
    accelerator, model, found = cls(cpu=True, **settings), bert(), []
    if limit:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    loader: Any = DataLoader(rows(), batch_size=16, collate_fn=lambda features: padded(features, classes=True))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = LinearLR(optimizer)
    if early:
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        model, loader = accelerator.prepare(model, loader)
    else:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        if limit:
            loss = accelerator.accumulate_batch(batch, lambda inputs: model(**inputs).loss)
        else:
            parts = [(micro.inputs, micro.weight) for micro in accelerator.micro_batches(batch)] if split else [(batch, 1.0)]
            loss = torch.stack([model(**inputs).loss * weight for inputs, weight in parts]).sum()
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm))
    accelerator.end_training()
    return found


@pytest.mark.parametrize(("limit", "followed"), [(None, False), (TOKENS, False), (None, True)])
def test_bare_loop_trains_the_same(limit: int | None, followed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()
    assert farthest(bare(limit, {"additive": "rows", **(WHOLE if limit else SPLIT)}, followed=followed), bare()) < CLOSE
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled()) == before
    output = capsys.readouterr().out
    assert "after step 1: active   length_batching" in output
    assert f"after step 1: {'inactive' if followed else 'active  '} optimizer" in output
    assert ("out of memory" in output) == (limit is not None)


class Around(torch.nn.Module):
    """A script's module with a model of transformers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = llama()

    def forward(self, **inputs: Any) -> Any:
        return self.inside(**inputs)


@pytest.mark.parametrize("make", [lambda: llama().eval(), Around], ids=["evaluation mode", "inside a module"])
def test_labels_of_a_causal_model_are_counted_where_its_loss_counts_them(
    make: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first token of a row has a label, and nothing predicts it. from_pretrained leaves a model in evaluation mode."""
    settings = {"additive": "labels", "length_batching": {"overhead_tokens": 1}, **SPLIT}
    assert farthest(bare(None, settings, make), bare(None, None, llama)) < CLOSE
    assert "after step 1: active   optimizer" in capsys.readouterr().out


def test_bare_loop_without_a_law_keeps_its_batches_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert farthest(bare(None, {**SPLIT, "compile": {}}), bare()) < CLOSE
    output = capsys.readouterr().out
    assert "skip     length_batching: hwopt does not know how the loss adds up" in output
    assert "skip     compile: your collator pads the batches" in output  # which the profile does not have


def test_word_without_the_call_that_splits_leaves_the_batches_whole(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 2)
    with hwopt.session("cpu", model, rows=3, additive="rows", precision=False) as session:
        optimizer = session.optimizer(model.parameters())
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    output = capsys.readouterr().out
    assert "skip     length_batching: your loop does not call micro_batches, accumulate or accumulate_batch" in output
    assert "after step 1: active   optimizer" in output


def test_state_of_another_scripts_optimizer_does_not_bring_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 2)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3, 4)).sum().backward()
    theirs.step()
    with hwopt.session("cpu", model, rows=3, precision=False) as session:
        optimizer = session.optimizer(model.parameters())
        optimizer.load_state_dict(theirs.state_dict())
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "1 call(s) of the fused kernel in this step" in capsys.readouterr().out


def test_forward_of_a_bare_loop_computes_in_bf16_until_the_end_of_the_session() -> None:
    model, batch = bert(), batches()[0]
    forward = model.forward
    with hwopt.session("cpu", model, rows=16):
        assert model(**batch).logits.dtype == torch.bfloat16
    assert model.forward == forward
    assert model(**batch).logits.dtype == torch.float32


def saved(model: Any) -> Any:
    """`model` from a file that `torch.save` wrote."""
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_session(model: Any) -> Any:
    return hwopt.session("cpu", model, rows=16)


def applied(model: Any) -> Any:
    return hwopt.apply(model, ["fused_loss", "checkpointing"], fused_loss={"backend": "torch"})


@pytest.mark.parametrize("host", [in_session, applied])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_model_can_be_copied_and_saved_while_it_trains(host: Callable[[Any], Any], copied: Callable[[Any], Any]) -> None:
    """The copy computes with weights of its own, without what the plan did to the forward method."""
    model, batch = llama(), batches(classes=False)[0]
    wanted = model(**batch).logits
    with host(model):
        again = copied(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.allclose(again(**batch).logits, wanted, atol=1e-6)
        assert "hwopt" not in {type(hook).__module__.partition(".")[0] for hook in again._forward_pre_hooks.values()}


def test_split_batches_of_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InputError, match=r"additive = 'rows' on 2 ranks: .* Leave additive out"):
        hwopt.session("cpu", bert(), rows=16, additive="rows")


def test_mistakes_are_refused_by_name() -> None:
    session, accelerator = partial(hwopt.session, model=bert(), rows=16), partial(hwopt.Accelerator, cpu=True, profile="cpu")
    mistakes: list[tuple[Any, str]] = [
        (lambda: session("cpu", additive="mean"), "additive = 'mean': expected one of sum, rows"),
        (lambda: accelerator(additive="mean"), "additive = 'mean': expected one of sum, rows"),
        (lambda: accelerator(precison=False), "'precison'.*Did you mean 'precision'"),
        (lambda: session("cpu", strict=True), "length_batching"),
        (lambda: accelerator().accumulate_batch({}, abs), "comes first"),
        (lambda: session("cpu", batch={"trian": 2}), r"^plugins.batch.trian: unknown key. Did you mean 'train'"),
        (lambda: session(Path("no/such.toml")), "^profile no/such.toml: no such file"),
        (lambda: hwopt.session("cpu", "bert-base", rows=16), "^expected a model, got str 'bert-base': load it first"),
        (lambda: hwopt.session("cpu", bert(), rows="16"), "^rows: expected the number of rows of an optimizer step, got '16'"),
        (lambda: session("cpux"), "^profile 'cpux': no such profile. Did you mean 'cpu'"),
    ]
    for mistake, message in mistakes:
        with pytest.raises((InputError, PluginError), match=message):
            mistake()
    with session("cpu", additive="rows") as own, pytest.raises(InputError, match="no optimizer yet"):
        own.accumulate(batches()[0], abs)


@pytest.mark.parametrize(("split", "limit", "early"), [(False, None, False), (True, None, True), (True, TOKENS, False)])
def test_accelerate_script_trains_the_same(
    split: bool, limit: int | None, early: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`early`: the optimizer is prepared before the model."""
    wanted = accelerated(accelerate.Accelerator)
    settings = {"additive": "rows" if split else None} | (WHOLE if limit else SPLIT)
    found = accelerated(hwopt.Accelerator, split, limit, early, profile="cpu", **settings)
    assert farthest(found, wanted) < CLOSE
    output = capsys.readouterr().out
    assert "1 call(s) of the fused kernel in this step" in output
    assert ("out of memory" in output) == (limit is not None)


def test_plan_ends_with_a_prepare_that_fails() -> None:
    accelerator = hwopt.Accelerator(profile="cpu", precision=False)
    model = bert()
    with pytest.raises(ValueError, match="device_placement"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), device_placement=[True])
    assert accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0] is not None
    accelerator.end_training()


def test_cell_of_a_notebook_that_ran_twice_ends_the_first_plan_with_its_new_accelerator() -> None:
    for dtype, precision in (("bf16", "bf16"), ("fp32", "no")):  # that of a plan is of its object alone
        accelerator = hwopt.Accelerator(profile="cpu", precision={"dtype": dtype})  # the name of the first one, which is lost
        assert (accelerator.mixed_precision, accelerate.Accelerator().mixed_precision) == (precision, "no")
        with nullcontext() if ScriptRun.active is None else pytest.raises(InputError, match=r"accelerator.end_training\(\)"):
            accelerator.prepare(bert())
    accelerator.end_training()
    accelerator.prepare(bert())
    accelerator.end_training()


def test_script_may_end_within_the_first_step() -> None:
    """Without `end_training()`. The model is a single layer, and the step's profiler begins in its own forward call."""
    script = """if True:
        import torch
        from hwopt import Accelerator

        model = torch.nn.Linear(4, 2)
        model, optimizer = Accelerator(profile="cpu").prepare(model, torch.optim.AdamW(model.parameters()))
        model(torch.ones(3, 4)).sum().backward()
        raise SystemExit("ends here")
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip().splitlines()[-1]) == (1, "ends here"), ended.stderr


@pytest.mark.parametrize(("cls", "kernels"), [("SGD", {}), ("AdamW", {"foreach": False}), ("AdamW", {"fused": False})])
def test_optimizer_of_another_class_or_kernels_stays(cls: str, kernels: Any, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = hwopt.Accelerator(cpu=True, profile="cpu")
    model = bert()
    optimizer = getattr(torch.optim, cls)(model.parameters(), lr=0.1, **kernels)
    assert accelerator.prepare(model, optimizer)[1].optimizer is optimizer
    accelerator.end_training()
    assert {key: optimizer.param_groups[0][key] for key in ("fused", "foreach")} == {"fused": None, "foreach": None} | kernels
    assert f"skip     optimizer: your script makes its own {cls}" in capsys.readouterr().out


def test_precision_of_the_script_wins(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = hwopt.Accelerator(cpu=True, profile="cpu", mixed_precision="no")
    accelerator.prepare(bert())
    accelerator.end_training()
    assert accelerator.mixed_precision == "no"
    assert "mixed_precision = 'no' of your script" in capsys.readouterr().out


def test_model_that_the_cpu_computes_faster_in_fp32_is_trained_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = hwopt.Accelerator(cpu=True, profile="cpu")
    assert accelerator.mixed_precision == "bf16"  # before the model is known
    speed = LayerSpeed(token_seconds=1e-4, micro_batch_seconds=3e-3, bf16_ratio=1.3)
    monkeypatch.setattr("hwopt.hosts.script_plan.with_layer_speed", lambda hardware, *_: replace(hardware, layer=speed))
    model = accelerator.prepare(bert())
    assert model(**batches()[0]).logits.dtype == torch.float32 == accelerator.unwrap_model(model).dtype
    accelerator.end_training()
    assert accelerator.mixed_precision == "no"


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    """One for the head, one for the rest."""
    head = {id(parameter) for parameter in model.classifier.parameters()}
    parts = [[p for p in model.parameters() if (id(p) in head) is own] for own in (True, False)]
    return [torch.optim.AdamW(part, lr=lr) for part, lr in zip(parts, (1e-2, 1e-3), strict=True)]


def with_two_optimizers(cls: type, folds: int = 1, **settings: Any) -> Steps:
    """A loop over `folds` models, each with two optimizers. hwopt's step of 16 rows runs out of memory."""
    reset()
    accelerator, found = cls(cpu=True, **settings), []
    for fold in range(folds):
        model = bert()
        if settings:
            model.register_forward_pre_hook(memory_of(TOKENS), with_kwargs=True)
        made = optimizers_of(model)
        model, *optimizers = accelerator.prepare(model, *made)
        for batch in batches()[fold:]:
            if settings:
                loss = accelerator.accumulate_batch(batch, lambda inputs, model=model: model(**inputs).loss)
            else:
                loss = model(**batch).loss
                accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append((loss.item(), norm))
        accelerator.free_memory()
    return found


def test_repeated_step_frees_the_gradients_of_all_optimizers_and_of_a_second_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = with_two_optimizers(hwopt.Accelerator, 2, profile="cpu", additive="rows", **WHOLE)
    assert capsys.readouterr().out.count("Training ran out of memory") == 2
    assert farthest(found, with_two_optimizers(accelerate.Accelerator, 2)) < CLOSE


@pytest.mark.parametrize(
    ("additive", "earlier", "advice"),
    [
        ("rows", 1, "as one batch, which is split and repeated as a whole, or lower plugins.batch.train (now 16 rows"),
        (None, 0, "say additive"),
    ],
)
def test_batch_that_is_not_repeated_says_what_to_do(additive: str | None, earlier: int, advice: str) -> None:
    model, settings = bert(), WHOLE if additive else {"precision": False}

    def loss(inputs: Any) -> Any:
        return model(**inputs).loss

    with hwopt.session("cpu", model, rows=16, additive=additive, **settings) as own:
        own.optimizer(model.parameters())
        for batch in batches()[:earlier]:
            own.accumulate(batch, loss)
        model.register_forward_pre_hook(memory_of(TOKENS), with_kwargs=True)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            own.accumulate(batches()[1], loss)
    assert advice in " ".join(raised.value.__notes__)


def test_wrong_word_and_batches_of_a_kind_are_refused() -> None:
    batch = batches()[0]
    values: Any = tuple(batch.values())
    with hwopt.session("cpu", model := bert(), rows=16, additive="sum", **SPLIT) as own:
        own.optimizer(model.parameters())
        with pytest.raises(InputError, match="additive = 'sum' is wrong for the first batch"):
            own.accumulate(batch, lambda inputs: model(**inputs).loss)
        with pytest.raises(InputError, match="a dict of tensors, got tuple"):
            own.accumulate(values, lambda inputs: model(*inputs).loss)
    normed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(InputError, match="is a BatchNorm.*leave additive out"):
        hwopt.session("cpu", normed, rows=16, additive="rows")


def test_arguments_of_accelerate_may_be_positional() -> None:
    assert hwopt.Accelerator(True, False, "no", cpu=True, profile="cpu").mixed_precision == "no"


def test_accelerator_draws_no_random_numbers_of_the_script() -> None:
    before = torch.get_rng_state()
    hwopt.Accelerator(profile="cpu", cpu=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("profile", ["auto", "rtx3090_24gb"])
def test_plan_for_the_cpu_of_a_machine_with_a_card_says_why(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = list(plan_for(bert(), profile, Script(16, 16, {}, on_cpu=True), {}).lines())
    assert not [line for line in lines if "no CUDA device" in line]
    assert ("profile auto: your script trains on the CPU" in lines) == (profile == "auto")


def test_training_on_the_cpu_of_a_machine_with_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What trains there has a plan of the CPU; a bare loop, which may yet move its model to the card, is refused."""
    monkeypatch.setattr("hwopt.hosts.script_plan.detect", lambda *_: described("NVIDIA GeForce RTX 3090", (8, 6), 23.7))
    accelerator = hwopt.Accelerator(cpu=True)
    accelerator.prepare(bert())
    assert accelerator.hwopt_session is not None
    assert accelerator.hwopt_session.run.plan.hardware.device_type == "cpu"
    accelerator.end_training()
    assert hwopt.optimized(Trainer)(bert(), arguments(tmp_path), train_dataset=rows())._run.plan.hardware.device_type == "cpu"
    batch = batches()[0]
    with hwopt.session("rtx3090_24gb", model := bert(), rows=16, precision=False) as own:
        with torch.no_grad():
            model(**batch)
        with pytest.raises(InputError, match="the model is on the cpu, and the plan is for NVIDIA GeForce RTX 3090: move it"):
            model(**batch)
        assert own.run.device.type == "cuda"
