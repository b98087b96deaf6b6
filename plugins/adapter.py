"""LoRA and DoRA: frozen weights, trained low-rank additions.

Source: Hu et al. 2022, LoRA (arXiv:2106.09685); Liu et al. 2024, DoRA (arXiv:2402.09353), which also trains the magnitude of
each row; made by PEFT. Hardware: any. Cost: LoRA a few per cent a step, DoRA 1.2 to 2 times; gained: no gradients and no
optimizer states for the frozen weights. Numerical effect: another training method.
Dropout is 0 unless asked: with it DoRA computes each frozen layer twice (PEFT has a cheaper path at 0, +29 % samples/s).
Under 500 million parameters full fine-tuning fits every card and trains better: skipped unless `always`.
The classification head is trained in full. At the end the adapter is saved as PEFT saves it and merged into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hwopt.errors import PluginError
from hwopt.plugin import Context, Decision, Evidence, MemoryOption, MemorySpec, Plugin, PluginOptions, Recipe, RunView, Stage

WORTH_IT_FROM = 500_000_000


def classification_heads(model: Any) -> list[str]:
    """Names of the trained parts beside the pretrained body: "classifier", "score", "pre_classifier" …"""
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and next(child.parameters(), None) is not None
    ]


def add_adapter(
    model: Any,
    run: RunView | None = None,
    *,
    dora: bool,
    r: int,
    lora_alpha: int,
    target_modules: Any,
    lora_dropout: float,
    task: str,
) -> Any:
    """`model` in PEFT's wrapper: only the adapter and, for SEQ_CLS, the head require gradients."""
    import warnings

    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=r,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        use_dora=dora,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        task_type=task,
        modules_to_save=classification_heads(model) if task == "SEQ_CLS" else None,
    )
    with warnings.catch_warnings():  # peft 0.21 reads a property that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated", category=FutureWarning)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # PEFT: no module of these names
            raise PluginError(f"plugins.adapter: target_modules = {target_modules!r}: {error}") from error
    # "auto" would ask the hub whether the vocabulary has grown
    wrapped.save_pretrained = partial(wrapped.save_pretrained, save_embedding_layers=False)
    return wrapped


def save_and_merge(model: Any, run: RunView) -> Any:
    """The plain model with the adapter merged in; rank 0 first saves the adapter in PEFT's own form."""
    if run.rank == 0:
        model.save_pretrained(run.extras / "adapter")
    return model.merge_and_unload()


class Adapter(Plugin):
    name = "adapter"
    stage = Stage.MODEL
    preserves = "method"
    resume_ignores = ("always",)
    renamed_options: ClassVar[Mapping[str, str]] = {
        "alpha": "lora_alpha",
        "target": "target_modules",
        "dropout": "lora_dropout",
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "lora_r": "r",
        "use_peft": "enabled = true",
        "peft_config": "enabled = true",
        "use_dora": "kind = 'dora'",
    }

    class Options(PluginOptions):
        kind: Literal["lora", "dora"] = Field(default="lora", description="dora also trains the magnitude of each row.")
        r: int = Field(default=16, gt=0, description="Rank of the additions.")
        lora_alpha: int = Field(default=32, gt=0, description="Their scale is lora_alpha / r.")
        target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
            default="all-linear", description="Names of the modules to adapt."
        )
        lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the additions.")
        always: bool = Field(default=False, description="Also for a model under 500 million parameters.")

    options: Options

    def probe(self, context: Context) -> Decision:
        if not context.has("peft"):
            return Decision.skip("peft is not installed")
        count = context.model.parameters
        size = f"{context.model.name} has {count / 1e6:,.1f} M parameters"
        if count < WORTH_IT_FROM and not self.options.always:
            least = f"{WORTH_IT_FROM / 1e6:,.0f} M"
            return Decision.skip(f"{size}, an adapter is worth it from {least}: all weights are trained unless always = true")
        reason = f"{self.options.kind} r={self.options.r} on {self.options.target_modules}: {size}"
        if self.options.kind == "dora" and self.options.lora_dropout:
            reason += f"; dropout {self.options.lora_dropout:g} takes DoRA's slower path"
        return Decision.apply(reason)

    def apply(self, recipe: Recipe, context: Context) -> None:
        chosen = self.options
        task = "SEQ_CLS" if context.job.task.kind == "text-classification" else "CAUSAL_LM"
        recipe.model_steps.append(
            partial(
                add_adapter,
                dora=chosen.kind == "dora",
                r=chosen.r,
                lora_alpha=chosen.lora_alpha,
                target_modules=chosen.target_modules,
                lora_dropout=chosen.lora_dropout,
                task=task,
            )
        )
        recipe.final_steps.append(save_and_merge)

    def memory(self, spec: MemorySpec, context: Context) -> None:
        # r x (inputs + outputs) of each linear layer; without their shapes, seven square ones a layer hold all but embeddings
        model = context.model
        spec.trained = min(spec.parameters, self.options.r * 2 * 7 * model.layers * model.hidden_size)

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        offer = cls.Options(always=True)
        return (
            []
            if options is not None
            else [MemoryOption(offer, 1.0, f"trains adapters (LoRA, r = {offer.r}) instead of all weights")]
        )

    def evidence(self, run: RunView) -> Evidence:
        named = list(run.inner_model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        others = [name for name, _ in trained if "lora_" not in name and "modules_to_save" not in name]
        magnitudes = sum("lora_magnitude_vector" in name for name, _ in trained)
        adapters = sum("lora_B" in name for name, _ in trained)
        # a gradient leaves its mean in the optimizer's state; not with A in step 1, where its B is still zero
        reached = sum(
            any(has_content(value) for key, value in state.items() if not key.startswith("qmap"))
            for state in run.optimizer.state.values()
        )
        seen = (
            f"{sum(p.numel() for _, p in trained):,} of {sum(p.numel() for _, p in named):,} parameters trained, "
            f"{adapters} adapters, {magnitudes} DoRA magnitudes; gradients reached {reached} of {len(run.engine.parameters)} "
            "tensors that the optimizer steps on"
        )
        if not adapters or others or (magnitudes == 0) == (self.options.kind == "dora"):
            return Evidence.inactive(f"{seen}; trained beside adapter and head: {', '.join(others[:3]) or 'nothing'}")
        enough = min(adapters, len(run.engine.parameters))  # engines step on flat ones, which hold many
        return Evidence.active(seen) if reached >= enough else Evidence.inactive(seen)


def has_content(value: Any) -> bool:
    """Whether an entry of an optimizer's state is a moment (not its step counter or quantization table) that is not all zero."""
    return getattr(value, "ndim", 0) > 0 and bool(value.any())
