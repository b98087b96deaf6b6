from collections import OrderedDict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_cases import Cases, Chosen, Mutation, Part
from torch.utils.hooks import RemovableHandle
from transformers.integrations.neftune import neftune_post_forward_hook

from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.neftune import EmbeddingNoise

NOISE = {"neftune": {"alpha": 7.0}}


def run_of(*lengths: int) -> Any:
    """A run whose step has rows of these lengths."""
    return SimpleNamespace(device=torch.device("cpu"), step_batch=SimpleNamespace(lengths=lengths))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.Embedding(9, 16)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embeddings


def test_noise_is_that_of_transformers_for_an_unsplit_batch() -> None:
    model, noise, tokens = Model(), EmbeddingNoise(5.0), torch.arange(8).view(2, 4)
    plain = model.embeddings(tokens)
    model.embeddings.neftune_noise_alpha = 5.0
    torch.manual_seed(0)
    theirs = neftune_post_forward_hook(model.embeddings, (tokens,), plain.clone())
    noise.add_to(model, run_of(4, 2))
    noise.on_step_begin(run_of(4, 2))
    torch.manual_seed(0)
    torch.testing.assert_close(model.embeddings(tokens), theirs)
    assert (model.eval().embeddings(tokens) == plain).all()
    noise.remove_from(model.train(), run_of())
    assert (model.embeddings(tokens) == plain).all()


def test_width_is_that_of_the_whole_step(tmp_path: Path) -> None:
    """A step of 8 rows in micro-batches of 2: the noise has the width of the longest of the 8."""
    job = tiny_job(tmp_path / "data", max_steps=2)
    run = train_tiny(plan_for(tiny_profile(batch={"train": 2, "effective": 8}, **NOISE), job), tmp_path).run
    noise = next(part for part in run.parts if isinstance(part, EmbeddingNoise))
    assert noise.calls == 4
    expected = 7.0 / (max(run.step_batch.lengths) * noise.size) ** 0.5
    assert float(noise.scale) == pytest.approx(expected)


def test_encoder_and_decoder_get_noise(tmp_path: Path) -> None:
    """Their layers share the weight of the input embeddings, which are not called."""
    run = train_tiny(plan_for(tiny_profile(**NOISE), tiny_job(tmp_path / "data", "seq2seq-lm", max_steps=1)), tmp_path).run
    assert next(part for part in run.parts if isinstance(part, EmbeddingNoise)).calls == 2 * 2


def no_hook(patch: pytest.MonkeyPatch) -> None:
    """torch calls no forward hooks of embeddings."""
    patch.setattr(torch.nn.Embedding, "register_forward_hook", lambda *_: RemovableHandle(OrderedDict()))


def hook_left_out(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """torch leaves the hook out in the chosen calls of the embeddings in training."""
    calls, real = count(), torch.nn.Embedding.register_forward_hook

    def register(self: Any, hook: Any) -> Any:
        return real(self, lambda module, *x: None if module.training and chosen(next(calls)) else hook(module, *x))

    patch.setattr(torch.nn.Embedding, "register_forward_hook", register)


def remove_hook(run: Any) -> None:
    run.inner_model.get_input_embeddings()._forward_hooks.clear()


CASES = Cases(
    writes=frozenset({"model_steps", "events", "final_steps"}),
    mutations=(Mutation("the hook is not called", no_hook, "added 0 times"),),
    parts=(Part("noise in some micro-batches", hook_left_out, later=remove_hook),),
)
