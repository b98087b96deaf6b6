"""LoRA and DoRA: train low-rank additions to frozen weights. DoRA also trains the magnitude of each weight row.

Frozen weights need no gradients and no optimizer state. PEFT creates the adapter. The classification head is trained in full.
After training, the adapter is saved in PEFT's format, and `final/` holds the model with the adapter merged into its weights.
An installed profile's adapter is skipped for a model with fewer than 500 million parameters, because full fine-tuning fits every
card there, unless `always` is set. An adapter that the job, `--set` or a profile of the user's own names is used for any size.

Source: LoRA, Hu et al. 2022 (arXiv:2106.09685); DoRA, Liu et al. 2024 (arXiv:2402.09353).
Hardware: any.
Cost: LoRA adds a few percent to the step time; DoRA takes 1.2 to 2 times as long. DoRA with dropout computes each frozen layer
twice; without dropout PEFT has a faster path (+29 % samples/s), so dropout is 0 by default.
Numerical effect: a different training method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hwopt.errors import PluginError
from hwopt.plugin import (
    OFF,
    Alias,
    Choice,
    Context,
    Decision,
    Evidence,
    MayChangeOnResume,
    MemorySpec,
    Plugin,
    PluginOptions,
    Recipe,
    RunView,
    Scale,
    Stage,
)
from hwopt_plugins.adapter.dora_graphs import traceable_dora

MIN_PARAMETERS = 500_000_000
"""An installed profile's adapter is skipped for smaller models."""

TRAINED = ("lora_", "modules_to_save", "trainable_tokens")
"""Parts of the names of the parameters that PEFT trains."""


def classification_heads(model: Any) -> list[str]:
    """The names of the trained modules outside the pretrained body, such as "classifier" and "score"."""
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and next(child.parameters(), None) is not None
    ]


def new_token_indices(model: Any) -> dict[str, list[int]] | None:
    """PEFT's `trainable_token_indices` for the tokens that the model got for this job, which no frozen row can learn."""
    tokens = list(getattr(model, "new_tokens", ()))
    if not tokens:
        return None
    layers = {id(layer): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None}
    tied = len({layer.weight.data_ptr() for layer in layers.values()}) < len(layers)  # PEFT follows the input embedding
    used = [model.get_input_embeddings()] if tied else layers.values()
    return {name: tokens for layer in used for name, module in model.named_modules() if module is layer}


def add_adapter(model: Any, run: RunView | None = None, *, options: Adapter.Options, task: str) -> Any:
    """`model` in PEFT's wrapper. Only the adapter requires gradients, and the classification head if `task` is SEQ_CLS."""
    import warnings

    from peft import LoraConfig, get_peft_model

    modules = options.target_modules
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        use_dora=options.kind == "dora",
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type=task,
        trainable_token_indices=new_token_indices(model),
        modules_to_save=classification_heads(model) if task == "SEQ_CLS" else None,
    )
    with warnings.catch_warnings():  # peft 0.21 reads a property that transformers 5.23 renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated", category=FutureWarning)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # PEFT found no module with these names
            raise PluginError(f"plugins.adapter: target_modules = {modules!r}: {error}") from error
    # the default "auto" queries the hub for the original vocabulary size
    wrapped.save_pretrained = partial(wrapped.save_pretrained, save_embedding_layers=False)
    return wrapped


def save_and_merge(model: Any, run: RunView) -> Any:
    """The model without PEFT's wrapper and with the adapter merged into its weights. Rank 0 also saves the adapter for PEFT."""
    if run.rank == 0:
        model.save_pretrained(run.extras / "adapter")
    return model.merge_and_unload()


def modules_from(value: Any) -> Mapping[str, Any]:
    """The options for the `lora_target_modules` of another tool: a list, "all-linear", or names with commas."""
    if isinstance(value, str) and value != "all-linear":
        value = [name.strip() for name in value.split(",")]
    return {} if value is None else {"target_modules": value}


class Adapter(Plugin):
    name = "adapter"
    stage = Stage.MODEL
    effect = "method"
    aliases: ClassVar[Mapping[str, str | Alias]] = {
        "lora_r": "r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": Alias("target_modules", modules_from),
        # the file asks for an adapter, whatever the size of the model
        "use_peft": Alias("enabled = true", lambda value: {"enabled": True, "always": True} if value else {}),
        "peft_config": "enabled = true",
        "use_dora": "kind = 'dora'",
    }

    class Options(PluginOptions):
        kind: Literal["lora", "dora"] = Field(default="lora", description="dora also trains the magnitude of each row.")
        r: int = Field(default=16, gt=0, description="Rank of the low-rank matrices.")
        lora_alpha: int = Field(default=32, gt=0, description="Scale of the adapter: lora_alpha / r.")
        target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
            default="all-linear", description="Names of the modules to adapt."
        )
        lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of the adapter.")
        always: Annotated[bool, MayChangeOnResume()] = Field(
            default=False, description="Use an installed profile's adapter for models under 500 million parameters too."
        )

    options: Options

    def probe(self, context: Context) -> Decision:
        if not context.has("peft"):
            return Decision.skip("peft is not installed")
        count = context.model.parameters
        size = f"{context.model.name} has {count / 1e6:,.1f} M parameters"
        if count < MIN_PARAMETERS and not self.options.always and self.name not in context.chosen:
            minimum = f"{MIN_PARAMETERS / 1e6:,.0f} M"
            return Decision.skip(f"{size}, fewer than {minimum}: all weights are trained unless plugins.adapter.always = true")
        reason = f"{self.options.kind} r={self.options.r} on {self.options.target_modules}: {size}"
        if self.options.kind == "dora" and self.options.lora_dropout:
            reason += f"; dropout {self.options.lora_dropout:g} uses DoRA's slower path"
        return Decision.apply(reason)

    def apply(self, recipe: Recipe, context: Context) -> None:
        if self.options.kind == "dora":
            recipe.process.append(traceable_dora)
        recipe.model_steps.append(partial(add_adapter, options=self.options, task=context.task.adapter))
        recipe.final_steps.append(save_and_merge)

    def memory(self, spec: MemorySpec, context: Context) -> None:
        # r x (inputs + outputs) for each linear layer. Estimate without shapes: seven square linear layers per transformer layer
        model = context.model
        spec.trained = min(spec.parameters, self.options.r * 2 * 7 * model.layers * model.hidden_size)

    @classmethod
    def alternatives(cls, options: Any | None, context: Context) -> list[Scale]:
        if options is not None:
            return []
        note = f"trains adapters (LoRA, r = {cls.Options().r}) instead of all weights"
        on = Choice(changes={"always": True}, note=note, alters=True)
        return [Scale(choices=(on, OFF), present=1)]

    def evidence(self, run: RunView) -> Evidence:
        named = list(run.inner_model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        unexpected = [name for name, _ in trained if not any(part in name for part in TRAINED)]
        magnitudes = sum("lora_magnitude_vector" in name for name, _ in trained)
        adapters = sum("lora_B" in name for name, _ in trained)
        # a gradient leaves a nonzero moment in the optimizer state; matrix A has none in step 1, because B is still zero
        updated = number_of_updated(run.optimizer.state.values())
        seen = (
            f"{sum(p.numel() for _, p in trained):,} of {sum(p.numel() for _, p in named):,} parameters trained, "
            f"{adapters} adapters, {magnitudes} DoRA magnitudes; {updated} of {len(run.engine.parameters)} "
            "tensors in the optimizer received gradients"
        )
        if not adapters or unexpected:
            return Evidence.inactive(f"{seen}; other trained parameters: {', '.join(unexpected[:3]) or 'none'}")
        expected = min(adapters, len(run.engine.parameters))  # a sharded engine has fewer, flat tensors
        return Evidence("active" if updated >= expected else "inactive", seen, {"kind": "dora" if magnitudes else "lora"})

    def expects(self) -> Mapping[str, Any]:
        return {"kind": self.options.kind}


def number_of_updated(states: Iterable[Mapping[str, Any]]) -> int:
    """How many of the optimizer's states have a moment with a nonzero element. Waits for the device once."""
    import torch

    number_and_moment = [
        (number, value)
        for number, state in enumerate(states)
        for key, value in state.items()
        if getattr(value, "ndim", 0) > 0 and not key.startswith("qmap")  # not the map of 8-bit values
    ]
    plain = [(number, value) for number, value in number_and_moment if type(value) is torch.Tensor and value.is_floating_point()]
    largest = list(torch._foreach_norm([value for _, value in plain], float("inf"))) if plain else []  # few kernels for all
    owners, done = [number for number, _ in plain], {id(value) for _, value in plain}
    for number, value in number_and_moment:
        if id(value) not in done:
            nonzero = value.any()
            owners.append(number)
            largest.append(nonzero.full_tensor() if hasattr(nonzero, "full_tensor") else nonzero)
    if not largest:
        return 0
    sizes = torch.stack([size.to(largest[0].device, torch.float32) for size in largest]).tolist()
    return len({number for number, size in zip(owners, sizes, strict=True) if size})
