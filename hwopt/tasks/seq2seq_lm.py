"""Sequence-to-sequence: an encoder-decoder such as T5 or BART reads a prompt and writes the completion.

Inputs and targets are tokenised apart. The decoder reads the target behind the model's start token and predicts each of its
tokens, the end-of-text token included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts
from hwopt.data.sources.columns import PROMPTS, is_text
from hwopt.data.sources.rows import Rows
from hwopt.data.sources.tables import Texts, text_columns
from hwopt.data.stores.chunks import Chunks
from hwopt.data.stores.token_store import PairStore
from hwopt.data.tokenizer import CHUNK, Encoding, encode, joined
from hwopt.errors import DataError, InputError
from hwopt.tasks.base import Task
from hwopt.tasks.generators import Generation, Seq2SeqGenerator
from hwopt.tasks.model_builder import set_in_configs
from hwopt.tasks.model_families import SEQ2SEQ_FAMILY, ModelFamily
from hwopt.tasks.next_token import token_loss
from hwopt.tasks.predictors import TextPredictor
from hwopt.tasks.preparation import token_store
from hwopt.tasks.prepared import Prepared, Samples, Trained
from hwopt.tasks.preview import Shown, Span, spans_of
from hwopt.tasks.recognition import Recognised

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

    from hwopt.data.batches.collate import Collate
    from hwopt.tasks.metrics import LossMetrics

PAIRS = (
    *(("document", "summary"), ("article", "summary"), ("text", "summary"), ("dialogue", "summary"), ("article", "highlights")),
    ("source", "target"),
)
"""Columns of data sets for summaries and translations."""
LANGUAGES = "ar bg cs da de el en es fa fi fr he hi hu it ja ko nl pl pt ro ru sv tr uk vi zh"
"""Codes that name the columns of translations: "de", "translation.de"."""
OTHERS = "Choose another encoder-decoder (T5, FLAN-T5, BART, Pegasus)"
ROUGE = ("rouge1", "rouge2", "rougeL")


class Seq2SeqLM(Task):
    """Write a completion for each prompt."""

    facts = TaskFacts(
        "seq2seq-lm",
        "AutoModelForSeq2SeqLM",
        target="next_token",
        encoder_decoder=True,
        adapter="SEQ_2_SEQ_LM",
        keys=frozenset({"data.prompt", "data.completion", "data.max_target_length", "task.rouge"}),
    )
    default_metric: ClassVar[str] = "eval_loss"
    metric_directions: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False, **dict.fromkeys(ROUGE, True)}
    pipeline_tag: ClassVar[str] = "text-generation"
    generates: ClassVar[bool] = True
    models: ClassVar[ModelFamily] = SEQ2SEQ_FAMILY

    @classmethod
    def check_job(cls, job: Job) -> None:
        if job.data.prompt is None:
            raise ValueError("data.prompt: seq2seq-lm needs data.prompt and data.completion, the columns of inputs and targets")
        metric = job.training.metric_for_best_model or ""
        if metric.removeprefix("eval_") in ROUGE and not job.task.rouge:
            raise ValueError(f"training.metric_for_best_model: {metric} needs task.rouge = true")

    @classmethod
    def recognise(cls, table: pa.Table, chosen: bool) -> Recognised | str:
        """Documents with summaries, or sentences with translations; prompts with completions are left to causal-lm."""
        languages = [name for name in table.column_names if name.rpartition(".")[2].lower() in LANGUAGES.split()]
        translated = [(languages[0], languages[1])] if len(languages) == 2 else []
        for prompt, completion in (*PAIRS, *translated, *(PROMPTS if chosen else ())):
            if is_text(table, prompt) and is_text(table, completion):
                why = f"columns {prompt!r} and {completion!r} are texts with summaries or translations"
                return Recognised({"prompt": prompt, "completion": completion}, (prompt, completion), why, 3)
        return "no pair of columns looks like inputs with targets; name them in the job with data.prompt and data.completion"

    def samples(self, rows: Rows, job: Job) -> Samples:
        pairs = (("data.prompt", job.data.prompt), ("data.completion", job.data.completion))
        return Samples.of(rows, [text_columns(rows, (str(name),), key)[0] for key, name in pairs])

    def store(self, samples: Samples, trained: Trained, cache: Path, seed: int | None = None) -> PairStore:
        """The store of `samples`: data.max_length truncates inputs, data.max_target_length targets. `seed` has no effect."""
        import numpy as np

        prompts, completions = samples.columns
        assert isinstance(prompts, Texts)
        tokenizer, limit = trained.tokenizer, trained.limit
        start = tokenizer.pad_token_id if trained.job.model.name is None else start_token(trained.config)
        most = trained.job.data.max_target_length
        most = most if limit.max_positions is None else min(most, limit.max_positions)

        def encoded(chunks: Chunks) -> Encoding:
            targets = Chunks(chunks.folder and chunks.folder / "targets")
            encode_targets(tokenizer, completions, most, targets)
            tokens, ids = targets.array("lengths", np.int64), targets.array("ids", np.int32)
            used = np.flatnonzero(tokens)
            if not len(used):
                raise DataError(f"{samples.places.source}: no completion has a token")
            arrays, meta = encode(tokenizer, [prompts.take(used)], limit, samples.places.take(used.tolist()), False, chunks)
            skipped = dict.fromkeys(np.flatnonzero(tokens == 0).tolist(), "has a completion without tokens")
            skipped |= {int(used[sample]): reason for sample, reason in meta["left_out"]}
            lengths, kept = np.minimum(tokens, most), np.ones(len(tokens), bool)
            kept[list(skipped)] = False
            arrays |= {
                "target_ids": ids[np.repeat(kept, lengths)] if skipped else ids,
                "target_offsets": np.concatenate([[0], np.cumsum(lengths[kept])]),
                "counts": lengths[kept].astype(np.int32),
            }
            meta |= {
                "max_target_length": most,
                "start": start,
                "cut_targets": int((tokens[kept] > most).sum()),
                "left_out": [[sample, skipped[sample]] for sample in sorted(skipped)],
                "largest_id": max(int(arrays["target_ids"].max()), int(arrays["input_ids"].max()), start),
            }
            return arrays, meta

        settings = [self.kind, limit.max_length, most, start]
        return token_store(PairStore, samples, trained, cache, settings, samples.columns, encoded)

    def collate(self) -> type[Collate]:
        from hwopt.data.batches.collate import PairCollate

        return PairCollate

    def fit_config(self, config: PretrainedConfig, job: Job, prepared: Prepared) -> None:
        """Set the vocabulary, and the padding token as the decoder's start token, as in T5."""
        super().fit_config(config, job, prepared)
        set_in_configs(config, decoder_start_token_id=prepared.tokenizer.pad_token_id)
        if getattr(config, "forced_eos_token_id", None) is not None:
            set_in_configs(config, forced_eos_token_id=prepared.tokenizer.eos_token_id)

    def fit_model(self, model: Any, prepared: Prepared) -> None:
        """Check the vocabulary, and that the model shifts targets as the store does. Raises InputError."""
        import torch

        super().fit_model(model, prepared)
        row = prepared.train.row(0)
        target = torch.tensor(row["decoder_labels"]).long()[None]  # (1, length)
        own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if own is not None and own(target)[0].tolist() != row["decoder_input_ids"].tolist():
            raise InputError(
                f"model: {type(model).__name__} makes the decoder's input in a way of its own, which hwopt does not support. "
                f"{OTHERS}"
            )

    def read_inputs(self, rows: Rows, job: Job) -> list[Any]:
        return list(zip(*text_columns(rows, (str(job.data.prompt),), "data.prompt"), strict=True))

    def predictor(self, trained: Trained, model: Any, generation: Generation) -> TextPredictor:
        return Seq2SeqGenerator(trained, model, generation)

    def usage(self, where: str) -> str:
        """transformers has no pipeline for encoder-decoders since version 5."""
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f'where = "{where}"  # or the path of this folder\n'
            "tokenizer, model = AutoTokenizer.from_pretrained(where), AutoModelForSeq2SeqLM.from_pretrained(where)\n"
            'written = model.generate(**tokenizer("…", return_tensors="pt"), max_new_tokens=128)\n'
            "print(tokenizer.decode(written[0], skip_special_tokens=True))"
        )

    def placeholder(self, job: Job, config: PretrainedConfig, length: int, target: int | None = None) -> dict[str, NDArray[Any]]:
        import numpy as np

        tokens = np.zeros(target or job.data.max_target_length, np.int64)
        return {"input_ids": np.zeros(length, np.int64), "decoder_input_ids": tokens, "decoder_labels": tokens}

    def generated_tokens(self, job: Job) -> int:
        return job.data.max_target_length if self.options.rouge else 0

    def show(self, prepared: Prepared, row: Mapping[str, NDArray[Any]]) -> Shown:
        """The input, and the target behind it."""
        tokens, target = row["input_ids"].tolist(), row["decoder_labels"].tolist()
        inputs = spans_of(prepared.tokenizer, tokens, [False] * len(tokens))
        return Shown((*inputs, Span("\n", False), *spans_of(prepared.tokenizer, target, [True] * len(target))), None, len(target))

    def loss(self, outputs: Any, targets: torch.Tensor, smoothing: float = 0.0) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed over the tokens of the targets, their number); targets (batch, longest target)."""
        return token_loss(outputs, targets, smoothing=smoothing)

    def metrics(self, prepared: Prepared, device: torch.device | str) -> LossMetrics:
        from hwopt.tasks.metrics import TokenMetrics

        if not self.options.rouge:
            return TokenMetrics(device)
        from hwopt.tasks.metrics import RougeMetrics

        return RougeMetrics(device, prepared.tokenizer, prepared.train.meta["max_target_length"])


def start_token(config: PretrainedConfig) -> int:
    """The first token that the decoder reads. Raises InputError if the model's config does not say."""
    found = getattr(config, "decoder_start_token_id", None)
    if not isinstance(found, int):
        raise InputError(
            f"model: the config of this {config.model_type} has no decoder_start_token_id: its decoder's first token is unknown. "
            f"{OTHERS}"
        )
    return found


def encode_targets(tokenizer: Any, texts: Sequence[str], most: int, chunks: Chunks) -> None:
    """Add to `chunks`: ids, at most `most` tokens of each target, the last one its end of the text; lengths before the cut.

    A text without tokens has the length 0 and no ids.
    """
    import numpy as np

    end = tokenizer.eos_token_id
    for at in range(chunks.done, len(texts), CHUNK):
        encoded = tokenizer(text_target=list(texts[at : at + CHUNK]), return_attention_mask=False, verbose=False)["input_ids"]
        bare = set(tokenizer.all_special_ids)
        found = [[] if bare.issuperset(tokens) else tokens for tokens in encoded]
        found = [[*tokens, end] if tokens and end not in (None, tokens[-1]) else tokens for tokens in found]
        cut = [tokens if len(tokens) <= most else [*tokens[: most - 1], tokens[-1]] for tokens in found]
        chunks.add(at + len(found), {"ids": joined(cut), "lengths": np.array([*map(len, found)], np.int64)})
