"""Words of transformers' TrainingArguments and of common scripts that are not keys of hwopt, and the key to give instead.

Words for keys of jobs and for options of the command line stand here. Plugins declare the words for their own options
(`Plugin.aliases`). Read only for messages, so a missing word costs no more than a hint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import metadata

INSTEAD = {
    # options of the command line
    "output_dir": "--output-dir",
    "run_name": "--name",
    "resume_from_checkpoint": "--resume, or --resume-from CHECKPOINT",
    "overwrite_output_dir": "--fresh",
    "trust_remote_code": "--trust-remote-code MODEL_NAME",
    "use_cpu": "--profile cpu",
    "no_cuda": "--profile cpu",
    # keys of a job
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "pretrained_model_name_or_path": "model.name",
    "tokenizer_name": "model.tokenizer",
    "train_file": "data.train",
    "train_path": "data.train",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "data_files": "data.train, a glob or a list of files",
    "dataset_config": 'data.train = "NAME:CONFIGURATION"',
    "dataset_config_name": 'data.train = "NAME:CONFIGURATION"',
    "config_name": 'data.train = "NAME:CONFIGURATION"',
    "configuration": 'data.train = "NAME:CONFIGURATION"',
    "mixture": "data.train = [{ path = …, weight = … }, …]",
    "datasets": "data.train = [{ path = …, weight = … }, …]",
    "probabilities": "data.train = [{ path = …, weight = … }, …]",
    "max_train_samples": "data.max_rows",
    "max_eval_samples": "data.max_rows",
    "max_samples": "data.max_rows",
    "eval_file": "data.eval",
    "validation_file": "data.eval",
    "eval_path": "data.eval",
    "text_column": "data.text",
    "text_column_name": "data.text",
    "label_column": "data.label",
    "label_column_name": "data.label",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "block_size": "data.max_length",
    "task": "task.kind",
    "lr": "training.learning_rate",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "steps": "training.max_steps",
    "scheduler": "training.lr_scheduler_type",
    "gradient_clipping": "training.max_grad_norm",
    "eval_strategy": "training.eval_steps (default: at the end of each epoch)",
    "evaluation_strategy": "training.eval_steps (default: at the end of each epoch)",
    "save_strategy": "training.save_steps or training.save_minutes",
    "logging_strategy": "training.logging_steps",
    "load_best_model_at_end": "training.metric_for_best_model (the best model is always what final/ holds)",
}

PLUGIN_GROUP = "hwopt.plugins"


@cache
def plugin_aliases() -> Mapping[str, str]:
    """Word -> "plugins.NAME.OPTION", as the installed plugins declare it. Called for messages only: it imports them all."""
    found: dict[str, str] = {}
    for entry_point in sorted(metadata.entry_points(group=PLUGIN_GROUP), key=lambda each: each.name):
        with suppress(Exception, SystemExit), redirect_stdout(sys.stderr):  # a broken plugin declares none
            for word, option in entry_point.load().aliases.items():
                found.setdefault(str(word), f"plugins.{entry_point.name}.{option}")
    return found


def instead_of(word: str) -> str:
    """The key to give for a `word` that is unknown in its table; "" for an unknown word."""
    if word in INSTEAD:
        return INSTEAD[word]
    option = plugin_aliases().get(word, "")
    return f"{option} (in a profile, or with --set)" if option else ""


def option_for(word: str) -> str:
    """The plugin option that an installed plugin declares for `word`, to be named in a message; `word` itself if none does."""
    return plugin_aliases().get(word, word)
