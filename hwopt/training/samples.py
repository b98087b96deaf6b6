"""GeneratedSamples: what a language model writes after each evaluation, for the prompts of the job."""

from __future__ import annotations

import json
from contextlib import suppress

import torch

from hwopt.data.sources.chat import Conversation
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.tasks.generators import Generation, TextGenerator
from hwopt.tasks.prepared import Trained
from hwopt.text import first_line
from hwopt.training.evaluation import evaluating
from hwopt.training.run import Run

SAMPLES = "samples.jsonl"
NEW_TOKENS = 64  # tokens of a sample


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

    def generate(self, prompt: str) -> str:
        """What `hwopt predict` writes after `prompt`: a question if the training samples are conversations, else a text."""
        run, tokenizer = self.run, self.run.prepared.tokenizer
        trained = Trained(run.plan.job, run.inner_model.config, tokenizer, (), run.plan.model.max_positions)
        generator = TextGenerator(trained, run.inner_model, Generation(NEW_TOKENS))
        asked = Conversation([{"role": "user", "content": prompt}]) if run.prepared.chat_tokens.chat else prompt
        (encoded,) = generator.encode([asked])
        if isinstance(encoded, str):
            raise ValueError(encoded)
        inputs = {key: tensor.to(run.device) for key, tensor in generator.batch([encoded], 1).items()}
        with torch.no_grad(), evaluating(run):
            ((text,),) = generator.predict(inputs)
        return str(text)
