"""EMA: an exponential moving average of the weights, which evaluation and `final/` use instead of the last weights.

Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017 (arXiv:1703.01780) for the exponential form.
Hardware: any. Cost: one more copy of the trained weights on the device, and one kernel a tensor per step.
Numerical effect: training is unchanged; what is evaluated and saved as the model is the average.
"""

from typing import Any

from pydantic import Field

from hwopt.plugin import Conflict, Context, Decision, Events, Evidence, Plugin, PluginOptions, Recipe, Relations, RunView, Stage


class Average(Events):
    """The averaged weights by parameter name. Checkpoints and the best weights hold it (`recipe.state`)."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.values: dict[str, Any] = {}
        self.updates = 0

    def on_step_end(self, run: RunView, applied: Any) -> None:
        self.updates += 1
        for name, parameter in zip(run.engine.names, run.engine.parameters, strict=True):
            if name not in self.values:
                self.values[name] = parameter.detach().clone()
                continue
            average = self.values[name] = self.values[name].to(parameter.device)  # a loaded one is in host memory
            average.lerp_(parameter.detach(), ((1 - self.decay) * applied).to(average.dtype))

    def on_evaluate_begin(self, run: RunView) -> None:
        """Exchange the weights and the average. Before the first step there is no average yet."""
        for name, parameter in zip(run.engine.names, run.engine.parameters, strict=True):
            if name in self.values:
                average, self.values[name] = self.values[name], parameter.detach().clone()
                parameter.data.copy_(average)

    on_evaluate_end = on_evaluate_begin

    def into_model(self, model: Any, run: RunView) -> Any:
        """A final step: the model of `final/` has the averaged weights."""
        self.on_evaluate_begin(run)
        return model

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = dict(state["values"]), int(state["updates"])


class Ema(Plugin):
    name = "ema"
    stage = Stage.LOOP
    effect = "method"
    relations = Relations(conflicts=(Conflict(lacks="whole_parameters", why="the average needs whole parameters on each rank"),))

    class Options(PluginOptions):
        decay: float = Field(default=0.999, gt=0, lt=1, description="Weight of the old average in each step.")

    def probe(self, context: Context) -> Decision:
        return Decision.apply(f"evaluates and saves an average of the weights, decay {self.options.decay:g}")

    def apply(self, recipe: Recipe, context: Context) -> None:
        average = Average(self.options.decay)
        recipe.state.append(average)
        recipe.events.append(average)
        recipe.final_steps.append(average.into_model)

    def evidence(self, run: RunView) -> Evidence:
        average = next(part for part in run.parts if isinstance(part, Average))
        seen = f"{len(average.values)} averaged tensors after {average.updates} update(s)"
        return Evidence.of(len(average.values) == len(run.engine.names), seen)
