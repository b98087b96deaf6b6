"""`hwopt.optimized` of TRL's trainers: losses, norms, adapters, what they log, and whose step is split."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hosts.scripts import SIZES, Log, Steps, farthest, llama, memory_of, reset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

import hwopt
from hwopt.data.batches.collate import cut_in_order
from hwopt.errors import InputError
from hwopt.hosts.additivity import PAIR_LOSSES, additivity_of
from hwopt.hosts.collated import micro_batches

# TRL and PEFT use the names that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

SPLIT = {"batch": {"train": 4}, "precision": {"dtype": "fp32"}}
QUIET = {"max_steps": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(100))]
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(choice: random.Random) -> str:
    return " ".join(f"w{choice.randrange(100)}" for _ in range(choice.randrange(2, 30)))


def data(*columns: str) -> Dataset:
    choice = random.Random(1)
    return Dataset.from_list([{name: f" {text(choice)}" for name in columns} for _ in range(64)])


def train(cls: type, config: Any, rows: Dataset, limit: int | None = None, model: Any = None, **given: Any) -> tuple[Any, Steps]:
    """`config`: makes the arguments."""
    reset()
    args = config()
    model, log = model or llama(), Log()
    if limit is not None:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    trainer = cls(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[log], **given)
    trainer.train()
    return trainer, log.steps


def sft(folder: Path) -> Any:
    from trl import SFTConfig  # takes ten seconds to import

    own = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 2e-3}
    # reads the optimizer's default rate, which is torch's 1e-3 unless set
    own |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}
    switch = "activation_checkpointing" if hasattr(SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
    return SFTConfig(str(folder), max_length=64, save_strategy="no", **QUIET, **own, **{switch: False})


@pytest.mark.parametrize(("limit", "adapter"), [(150, True), (None, False)])
def test_sft_trains_the_same(limit: int | None, adapter: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig
    from trl import SFTTrainer

    rows = data("prompt", "completion")

    def given() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)} if adapter else {}

    plain, wanted = train(SFTTrainer, partial(sft, tmp_path / "plain"), rows, **given())
    cls = hwopt.optimized(SFTTrainer, "cpu", **SPLIT)
    trainer, found = train(cls, partial(sft, tmp_path / "ours"), rows, limit, **given())
    assert farthest(found, wanted) < 1e-5
    groups = [[len(group["params"]) for group in each.optimizer.param_groups] for each in (plain, trainer)]
    assert groups[0] == groups[1], "checkpoints resume in the unmodified script"
    assert trainer.state.log_history[-2]["num_tokens"] == plain.state.log_history[-2]["num_tokens"]
    output = capsys.readouterr().out
    assert "a step is split by length: the loss of SFTTrainer, loss_type = 'nll', is divided by the labels of" in output
    assert "unlike in the unmodified script: entropy, mean_token_accuracy" in output
    assert ("out of memory" in output) == (limit is not None)


def test_frozen_half_weights_under_an_adapter_are_trained_with(tmp_path: Path) -> None:
    """As in every recipe of TRL: the base in bf16, the adapter in fp32."""
    from peft import LoraConfig
    from trl import SFTTrainer

    cls = hwopt.optimized(SFTTrainer, "cpu", precision={"dtype": "fp32"})
    config = partial(sft, tmp_path)
    trainer, steps = train(cls, config, data("prompt", "completion"), model=llama().bfloat16(), peft_config=LoraConfig(r=4))
    assert steps
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}


def test_half_weights_that_the_arguments_load_are_refused(tmp_path: Path) -> None:
    """Small updates of them would be lost, as of those of a loaded model."""
    from trl import SFTTrainer

    llama().save_pretrained(tmp_path / "model")
    args = sft(tmp_path)
    args.bf16, args.model_init_kwargs = True, {"dtype": "bfloat16"}
    cls, rows = hwopt.optimized(SFTTrainer, "cpu", precision={"dtype": "bf16"}), data("prompt", "completion")
    with pytest.raises(InputError, match="trains bfloat16 weights"):
        cls(str(tmp_path / "model"), args=args, train_dataset=rows, processing_class=tokenizer())


def preference_model(folder: Path) -> Any:
    """A model that was loaded from `folder`: TRL loads its reference by that name."""
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def near(found: Any, wanted: Any) -> Any:
    return found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_pairs_of_dpo_are_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl import DPOConfig, DPOTrainer

    rows = data("prompt", "chosen", "rejected")

    def steps(cls: type, name: str, limit: int | None = None) -> tuple[Any, Steps]:
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        config = partial(DPOConfig, str(tmp_path / name), save_strategy="no", learning_rate=1e-2, **sizes, **QUIET)
        return train(cls, config, rows, limit, model=preference_model(tmp_path / "model"))

    plain, wanted = steps(DPOTrainer, "plain")
    for limit in (None, 300):
        trainer, found = steps(hwopt.optimized(DPOTrainer, "cpu", **SPLIT), "ours", limit)
        assert farthest(found, wanted) < 1e-5
        output = capsys.readouterr().out
        assert "a step is split by length: the loss of DPOTrainer, sigmoid, is a mean over pairs" in output
        assert "unlike in the unmodified script: entropy, logits/chosen, logits/rejected, mean_token_accuracy" in output
        assert ("out of memory" in output) == (limit is not None)
        for ours, theirs in zip(trainer.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
            same = [name for name in theirs if name.startswith(("rewards/", "logps/", "num_tokens"))]
            assert len(same) == 7
            assert all(near(ours[name], theirs[name]) for name in same)


def test_losses_of_pairs_on_the_list_add_up_whatever_the_weights_are(tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(str(tmp_path), save_strategy="no", label_smoothing=0.1, **QUIET)
    rows = data("prompt", "chosen", "rejected").select(range(3))
    trainer = DPOTrainer(preference_model(tmp_path / "m"), args=config, train_dataset=rows, processing_class=tokenizer())
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(3)])
    model = trainer.model.double().eval()
    trainer.ref_model.double()

    def loss_of(inputs: Any) -> float:
        with torch.no_grad():
            return float(trainer.compute_loss(model, dict(inputs)))

    for _changes in range(2):
        for name in PAIR_LOSSES:
            trainer.loss_types, trainer.loss_weights = [name, "sigmoid"], [1.0, 0.5]
            found = additivity_of(trainer, False)
            assert (found.law, found.pairs) == ("rows", True)
            parts = micro_batches([batch], "rows", cut_in_order, 1, 0, pairs=True)
            assert len(parts) == 3
            assert sum(loss_of(part.inputs) * part.weight for part in parts) == pytest.approx(loss_of(batch), rel=1e-6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    for name in ("aot", "aot_unpaired", "sft"):
        trainer.loss_types, trainer.loss_weights = [name], [1.0]
        assert additivity_of(trainer, False).law is None


def test_reward_model_with_margins_is_split(tmp_path: Path) -> None:
    from trl import RewardConfig, RewardTrainer

    rows = data("chosen", "rejected").add_column("margin", [number / 64 for number in range(64)])

    def steps(cls: type, name: str) -> tuple[Any, Steps]:
        torch.manual_seed(0)
        config = partial(RewardConfig, str(tmp_path / name), save_strategy="no", center_rewards_coefficient=0.1, **QUIET)
        size = {"vocab_size": 200, "pad_token_id": 0, "num_labels": 1, "max_position_embeddings": 64}
        return train(cls, config, rows, model=LlamaForSequenceClassification(LlamaConfig(**size, **SIZES)))

    plain, wanted = steps(RewardTrainer, "plain")
    trainer, found = steps(hwopt.optimized(RewardTrainer, "cpu", **SPLIT), "ours")
    assert farthest(found, wanted) < 1e-5
    assert all(len(step.sizes) > 1 for step in trainer._run.steps)
    logs = zip(trainer.state.log_history[:-1], plain.state.log_history[:-1], strict=True)
    assert all(near(ours[name], theirs[name]) for ours, theirs in logs for name in ("accuracy", "margin", "mean_reward"))


@pytest.mark.filterwarnings(
    "ignore:.*remove_unused_columns=False:UserWarning", "ignore:You are importing from 'trl.exp:UserWarning"
)
@pytest.mark.parametrize("name", ["KTO", "GRPO", "ORPO"])
def test_loss_over_a_batch_and_rows_made_in_the_step_stay_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import trl

    if name == "ORPO":
        from trl.experimental import orpo as package

        rows = data("prompt", "chosen", "rejected")
    else:
        package = trl
        rows = data("prompt", "completion").add_column("label", [number % 3 > 0 for number in range(64)])

    def steps(cls: Any, folder: str) -> tuple[Any, Steps]:
        more: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4}
        if name == "GRPO":
            more |= {"num_generations": 4, "max_completion_length": 4}
            cls = partial(cls, reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions])
        config = partial(getattr(package, f"{name}Config"), str(tmp_path / folder), save_strategy="no", **(QUIET | more))
        model = preference_model(tmp_path / "model")
        torch.manual_seed(0)
        return train(cls, config, rows, model=model)

    cls = getattr(package, f"{name}Trainer")
    _, wanted = steps(cls, "plain")
    trainer, found = steps(hwopt.optimized(cls, "cpu", **SPLIT), "ours")
    assert farthest(found, wanted) == 0
    reason = "the trainer makes its rows inside the step" if name == "GRPO" else f"{name}Trainer computes a loss of its own"
    assert f"skip     batch: {reason}" in capsys.readouterr().out.replace("a step is not split: ", "")
    assert {"optimizer", "sdpa"} <= {entry.name for entry in trainer._run.plan.applied()}
