"""GeneratedSamples: what a language model writes after each evaluation, for the prompts of the job."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.text import first_line
from hwopt.training.evaluation import evaluating

if TYPE_CHECKING:
    from hwopt.training.run import Run

SAMPLES = "samples.jsonl"
NEW_TOKENS = 64
"""Tokens of a sample."""


class GeneratedSamples:
    """Generates greedily, so that equal weights write equal texts. Every rank generates; the first one shows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.prompts = run.plan.job.data.sample_prompts
        if self.prompts and run.engine.meets_in_micro_batches:
            self.prompts = ()
            run.warn("data.sample_prompts: this engine cannot generate text while it trains; no samples are written")

    def show(self) -> None:
        """Generate a sample for each prompt, show it, and append it to samples.jsonl."""
        for prompt in self.prompts:
            try:
                text = self.generate(prompt)
            except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
                self.prompts = ()
                release_unused_memory()
                self.run.warn(f"data.sample_prompts: generation failed ({first_line(error)}); no more samples are written")
                return
            if self.run.is_main:
                self.run.say(f"sample at step {self.run.step:,}: {prompt!r} -> {text!r}")
                with suppress(OSError), open(self.run.folder / SAMPLES, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": self.run.step, "prompt": prompt, "text": text}) + "\n")

    @torch.no_grad()
    def generate(self, prompt: str) -> str:
        """What the model writes after `prompt`: an ordinary text, or a question if the tokenizer has a chat template."""
        tokenizer, model = self.run.prepared.tokenizer, self.run.inner_model
        text = prompt
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
        tokens = inputs["input_ids"].to(self.run.device)  # (1, length)
        with evaluating(self.run):
            written: Any = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        return str(tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True))
