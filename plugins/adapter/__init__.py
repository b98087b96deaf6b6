"""LoRA and DoRA: train low-rank additions to frozen weights. DoRA also trains the magnitude of each weight row.

PEFT creates the adapter; options have its names. The classification head is trained in full. After training, the adapter is
saved in PEFT's format, and `final/` holds the model with the adapter merged into its weights.
An installed profile's adapter is skipped for a model with fewer than 500 million parameters, because full fine-tuning fits every
card there, unless `always` is set. An adapter that the job, `--set` or a profile of the user's own names is used for any size.

Source: LoRA, Hu et al. 2022 (arXiv:2106.09685); DoRA, Liu et al. 2024 (arXiv:2402.09353).
Hardware: any.
Cost: LoRA adds a few percent to the step time; DoRA takes 1.2 to 2 times as long. DoRA with dropout computes each frozen layer
twice; without dropout PEFT has a faster path (+29 % samples/s), so dropout is 0 by default.
Numerical effect: a different training method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt import plugin as hw
from hwopt.errors import PluginError
from hwopt_plugins.adapter.adapted_layers import idle_adapters, layers_without_adapter

MIN_PARAMETERS = 500_000_000
"""An installed profile's adapter is skipped for smaller models."""

NAMED_MODULES = {"all-linear": "all-linear", "default": None}
"""Value of `target_modules` that is not a list -> PEFT's value."""
CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION")
"""PEFT's task types of classifiers: of texts, words and images."""
LOFTQ = "loftq"
"""The initialization that takes up the rounding of quantized weights. PEFT's own needs a GPU and ignores lora_alpha."""
TRAINED = ("lora_", "modules_to_save", "trainable_tokens")
"""Parts of the names of the parameters that PEFT trains."""


def classification_heads(model: Any) -> list[str]:
    """The names of the trained modules outside the pretrained body, such as "classifier" and "score"."""
    return [name for name, child in model.named_children() if name != model.base_model_prefix and [*child.parameters()]]


def adapts_experts(options: Adapter.Options, model: hw.ModelFacts) -> bool:
    """Whether PEFT adapts the experts of a mixture, each layer's as one parameter. For those it has LoRA without dropout only."""
    if options.target_modules != "all-linear" or not model.other_weights:
        return False
    from peft.utils import transformers_weight_conversion as conversion

    return conversion._MODEL_TO_CONVERSION_PATTERN.get(model.model_type) in conversion._MOE_FUSED_TARGETS


def new_token_indices(model: Any, in_full: Sequence[str] = ()) -> dict[str, list[int]] | None:
    """PEFT's `trainable_token_indices` for the tokens that the model got for this job, which no frozen row can learn.

    Modules that are trained `in_full` need none, nor does a layer that shares its weight with one of them.
    """
    tokens = list(getattr(model, "new_tokens", ()))
    if not tokens:
        return None
    layers = {id(layer): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None}
    tied = len({id(layer.weight) for layer in layers.values()}) < len(layers)  # fake tensors have no addresses
    names = {name: layer for layer in layers.values() for name, module in model.named_modules() if module is layer}
    full = {name for name in names if name.split(".")[-1] in in_full or name in in_full}
    if tied and full and full != names.keys():
        missing = ", ".join(sorted(names.keys() - full))
        raise PluginError(f"plugins.adapter: modules_to_save needs {missing} too, which has the same weights and new tokens")
    used = [model.get_input_embeddings()] if tied else layers.values()  # PEFT follows the input embedding
    return dict.fromkeys((name for name, layer in names.items() if layer in used and name not in full), tokens) or None


def lora_config(options: Adapter.Options, task: str | None, heads: Sequence[str] = (), tokens: Any = None) -> Any:
    """PEFT's configuration. `heads` are trained in full; `tokens`: PEFT's `trainable_token_indices`."""
    from peft import LoraConfig

    modules, init = options.target_modules, options.init_lora_weights
    return LoraConfig(
        **options.model_dump(mode="json", include={"r", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform"}),
        use_dora=options.kind == "dora",
        init_lora_weights=init if init != LOFTQ else True,
        target_modules=NAMED_MODULES[modules] if isinstance(modules, str) else list(modules),
        exclude_modules=rf"({'|'.join(heads)})(\..+)?" if heads else None,  # "all-linear" would adapt them
        task_type=None if task == "FEATURE_EXTRACTION" else task,  # its wrapper passes attention_mask, which Swin gets twice
        trainable_token_indices=tokens,
        modules_to_save=[*heads, *options.modules_to_save] or None,
    )


def add_adapter(model: Any, run: hw.RunView | None = None, *, options: Adapter.Options, task: str) -> Any:
    """`model` in PEFT's wrapper. Only the adapter requires gradients, and the classification head if `task` is SEQ_CLS."""
    import warnings

    from peft import get_peft_model

    heads = classification_heads(model) if task in CLASSIFIERS else []
    config = lora_config(options, task, heads, new_token_indices(model, options.modules_to_save))
    with warnings.catch_warnings():  # peft 0.21 reads a property that transformers 5.23 renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated", category=FutureWarning)
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # PEFT found no module with these names
            raise PluginError(f"plugins.adapter: target_modules = {options.target_modules!r}: {error}") from error
    config.init_lora_weights = options.init_lora_weights  # what quantizes the weights does LoftQ, and then sets it to true
    # the default "auto" queries the hub for the original vocabulary size
    wrapped.save_pretrained = partial(wrapped.save_pretrained, save_embedding_layers=False)
    return wrapped


@contextmanager
def traceable_dora() -> Iterator[None]:
    """Inside the block torch.compile can trace PEFT's DoRA layers with plain weights, which compute the same. For the process.

    In peft 0.21 `str.startswith` on the name of a module, and writes to an empty dictionary, break the graph of every layer.
    """
    from unittest.mock import patch

    import torch
    from peft.tuners.lora import dora

    dequantized = dora.dequantize_module_weight

    def weight(module: Any) -> Any:
        return module.weight if type(module.weight) is torch.nn.Parameter else dequantized(module)

    def clear_cache(layer: Any) -> None:
        if layer._dora_cache:  # filled only in evaluation, and only inside `peft.helpers.DoraCaching`
            layer._dora_cache.clear()

    with patch.object(dora, "dequantize_module_weight", weight), patch.object(dora.DoraLinearLayer, "_cache_clear", clear_cache):
        yield


def save_and_merge(model: Any, run: hw.RunView) -> Any:
    """The model without PEFT's wrapper and with the adapter merged into its weights. Rank 0 also saves the adapter for PEFT."""
    if run.rank == 0:
        model.save_pretrained(run.extras / "adapter")
    return model.merge_and_unload()


def modules_for(option: str) -> hw.Alias:
    """The alias of `option` for modules of another tool: a list, a word of NAMED_MODULES, or names with commas."""

    def translated(value: Any) -> Mapping[str, Any]:
        if isinstance(value, str) and value not in NAMED_MODULES:
            value = [name.strip() for name in value.split(",")]
        return {} if value is None else {option: value}

    return hw.Alias(option, translated)


class Adapter(hw.Plugin):
    name = "adapter"
    stage = hw.Stage.MODEL
    effect = "method"
    traits = hw.Traits(freezes=True)
    aliases: ClassVar[Mapping[str, str | hw.Alias]] = {
        "lora_r": "r",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": modules_for("target_modules"),
        "modules_to_save": modules_for("modules_to_save"),
        "layers_to_transform": "layers_to_transform",
        "init_lora_weights": "init_lora_weights",
        "use_rslora": "use_rslora",
        # the file asks for an adapter, whatever the size of the model
        "use_peft": hw.Alias("enabled = true", lambda value: {"enabled": True, "always": True} if value else {}),
        "peft_config": "enabled = true",
        "use_dora": "kind = 'dora'",
    }

    class Options(hw.PluginOptions):
        kind: Literal["lora", "dora"] = "lora"
        """dora also trains the magnitude of each row."""
        r: int = Field(default=16, gt=0)
        """Rank of the low-rank matrices."""
        lora_alpha: int = Field(default=32, gt=0)
        """Scale of the adapter: lora_alpha / r."""
        target_modules: Literal["all-linear", "default"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
        """Names of the modules to adapt; default: PEFT's for the model's type."""
        lora_dropout: float = Field(default=0.0, ge=0, lt=1)
        """Dropout on the input of the adapter."""
        use_rslora: bool = False
        """Scale the adapter by lora_alpha / sqrt(r) instead (rank-stabilized)."""
        init_lora_weights: Literal[True, "gaussian", "orthogonal", "olora", "pissa", "loftq"] = True
        """PEFT's initialization; true: B = 0. loftq needs quantized weights."""
        modules_to_save: tuple[str, ...] = ()
        """Names of further modules to train in full."""
        layers_to_transform: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
        """Indices of the layers to adapt; needs target_modules as a list. Default: all."""
        always: Annotated[bool, hw.MayChangeOnResume()] = False
        """Use an installed profile's adapter for models under 500 million parameters too."""

        @model_validator(mode="after")
        def require_names_for_layers(self) -> Adapter.Options:
            if self.layers_to_transform is not None and isinstance(self.target_modules, str):
                raise ValueError('layers_to_transform needs the names of modules: target_modules = ["q_proj", "v_proj"]')
            return self

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if not context.has("peft"):
            return hw.Decision.skip("peft is not installed")
        if context.job.model.chooses_weights:
            if self.name in context.chosen:
                raise PluginError(
                    "model.freeze and model.train_only say which weights are trained, and so does an adapter; remove one"
                )
            return hw.Decision.skip("model.freeze or model.train_only says which weights are trained")
        count = context.model.parameters
        size = f"{context.model.name} has {count / 1e6:,.1f} M parameters"
        if count < MIN_PARAMETERS and not self.options.always and self.name not in context.chosen:
            why = f"fewer than {MIN_PARAMETERS / 1e6:,.0f} M: all weights are trained unless plugins.adapter.always = true"
            return hw.Decision.skip(f"{size}, {why}")
        reason = f"{self.options.kind} r={self.options.r} on {self.options.target_modules}: {size}"
        if (self.options.kind == "dora" or self.options.lora_dropout) and adapts_experts(self.options, context.model):
            to = self.options.changed(kind="lora", lora_dropout=0.0)
            return hw.Decision.fallback(to, f"PEFT adapts the experts of this model only by LoRA without dropout: {size}")
        if self.options.kind == "dora" and self.options.lora_dropout:
            reason += f"; dropout {self.options.lora_dropout:g} uses DoRA's slower path"
        return hw.Decision.apply(reason)

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        if self.options.kind == "dora":
            recipe.process.append(traceable_dora)
        recipe.model_steps.append(partial(add_adapter, options=self.options, task=context.task.adapter))
        if context.task.adapter == "CAUSAL_LM" and self.options.init_lora_weights != LOFTQ:  # other tasks train a head too
            recipe.trainer["peft_config"] = partial(lora_config, self.options, "CAUSAL_LM")
        recipe.final_steps.append(save_and_merge)

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        # r x (inputs + outputs) for each linear layer. Estimate without shapes: seven square linear layers per transformer layer
        model = context.model
        spec.trained = min(spec.parameters, self.options.r * 2 * 7 * model.layers * model.hidden_size)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        if options is not None:
            return []
        note = f"trains adapters (LoRA, r = {cls.Options().r}) instead of all weights"
        return [hw.Scale(choices=(hw.Choice(changes={"always": True}, note=note, alters=True), hw.OFF), present=1)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        named = list(run.inner_model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        unexpected = [name for name, _ in trained if not any(part in name for part in TRAINED)]
        magnitudes = sum("lora_magnitude_vector" in name for name, _ in trained)
        adapters = sum("lora_B" in name for name, _ in trained)
        # a gradient leaves a nonzero moment in the optimizer state; matrix A has none in step 1, because B is still zero
        updated = tensors_with_moment(run.optimizer.state.values())
        without, idle = layers_without_adapter(run.inner_model), idle_adapters(run)
        seen = f"{sum(p.numel() for _, p in trained):,} of {sum(p.numel() for _, p in named):,} parameters trained, "
        seen += f"{adapters} adapters, {magnitudes} DoRA magnitudes; {updated} of {len(run.engine.parameters)} "
        seen += "tensors in the optimizer received gradients"
        seen += f"; {len(without)} layers of the same names have no adapter: {hw.first_names(without)}" if without else ""
        seen += f"; {len(idle)} adapters are not computed or do not train: {hw.first_names(idle)}" if idle else ""
        if any(config.init_lora_weights == LOFTQ for config in getattr(run.inner_model, "peft_config", {}).values()):
            return hw.Evidence.inactive(f"{seen}; LoftQ had no quantized weights: use it with [plugins.quantize]")
        if not adapters or unexpected:
            return hw.Evidence.inactive(f"{seen}; other trained parameters: {', '.join(unexpected[:3]) or 'none'}")
        kinds = frozenset({"dora"} if magnitudes == adapters else {"lora", "dora"} if magnitudes else {"lora"})
        layers = [module for module in run.inner_model.modules() if hasattr(module, "lora_B")]
        scales = frozenset(scale for layer in layers for scale in layer.scaling.values())
        dropout = frozenset(getattr(each, "p", 0.0) for layer in layers for each in layer.lora_dropout.values())
        right = not idle and updated >= min(adapters + magnitudes, len(run.engine.parameters))  # flat tensors if sharded
        return hw.Evidence.of(right, seen, kind=kinds, without_adapter=len(without), scale=scales, dropout=dropout)

    def expects(self) -> Mapping[str, Any]:
        modules = self.options.target_modules
        some = self.options.layers_to_transform or (not isinstance(modules, str) and any("." in name for name in modules))
        rank = sqrt(self.options.r) if self.options.use_rslora else self.options.r
        values = {"scale": self.options.lora_alpha / rank, "dropout": self.options.lora_dropout}
        return {"kind": self.options.kind} | values | ({} if some else {"without_adapter": 0})


def dequantized(moment: Any) -> Any:
    """`moment`; of a state that torchao quantized its values, on this rank if it is sharded: it has no `any`."""
    local = getattr(moment, "_local_tensor", moment)
    return local.dequantize() if "OptimState" in type(local).__name__ else moment


def tensors_with_moment(states: Iterable[Mapping[str, Any]]) -> int:
    """The number of optimizer states, each of a tensor, with a nonzero element in a moment. Waits once for each device."""
    import torch

    found = []
    for state in states:  # without the map of 8-bit values
        moments = [value for key, value in state.items() if getattr(value, "ndim", 0) > 0 and not key.startswith("qmap")]
        nonzero = [dequantized(moment).any() for moment in moments]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in nonzero]
        found += [torch.stack(whole).any()] if whole else []
    return sum(int(torch.stack([each for each in found if each.device == at]).sum()) for at in {each.device for each in found})
