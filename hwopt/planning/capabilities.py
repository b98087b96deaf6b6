"""What a bug report needs: versions, the hardware, and the decision of every installed plugin with its default options."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from hwopt.config.job import Data, Job
from hwopt.config.job_model import Model
from hwopt.errors import PluginError
from hwopt.hardware.detect import SystemReport, detect, detect_software, report_system, reported_packages
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.planning.decisions import check_decision
from hwopt.plugin import Context
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry

BERT_BASE = ModelFacts(
    name="a model like BERT-base",
    model_type="bert",
    architecture="BertForSequenceClassification",
    parameters=109_483_778,
    layers=12,
    hidden_size=768,
    vocab_size=30_522,
    max_positions=512,
    supports_sdpa=True,
    supports_flash=True,
    supports_checkpointing=True,
    attention_dropout=0.1,
    prebuilt_mask=True,
    packing_problem="",
    operations=328,
    flops_per_token=172_247_088.0,
    values_per_token=447_147.0,
)
"""The facts that `model_facts` finds for BertConfig(); a test compares them. Building the model here would take a second."""


@dataclass(frozen=True)
class Answer:
    name: str
    distribution: str
    decision: str
    reason: str


@dataclass(frozen=True)
class Survey:
    system: SystemReport
    hardware: Hardware
    """The device that a run uses."""
    software: dict[str, str]
    """Package -> version."""
    plugins: tuple[Answer, ...]


def survey() -> Survey:
    """The decisions of all plugins. A plugin that raises is reported in its own line."""
    registry, hardware, software = Registry(), detect(), detect_software()
    job = Job(model=Model(name=BERT_BASE.name), data=Data(train="train.csv"))
    context = Context(hardware, software, BERT_BASE, job)
    answers = tuple(ask(registry, name, context) for name in registry.names)
    return Survey(report_system(), hardware, software | reported_packages(), answers)


def ask(registry: Registry, name: str, context: Context) -> Answer:
    distribution = registry.distribution(name)
    try:
        plugin_class = registry.plugin(name)
        with plugin_guard(f"plugin {name!r}", "probe()"):
            try:
                plugin = plugin_class(plugin_class.Options())
            except ValidationError:
                how = "has no default options; put a table into a profile and see `hwopt plan`"
                return Answer(name, distribution, "ask", how)
            decision = plugin.probe(context)
            check_decision(decision, plugin_class.Options)
    except PluginError as error:
        return Answer(name, distribution, "broken", str(error))
    return Answer(name, distribution, decision.kind, decision.reason)
