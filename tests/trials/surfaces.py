"""Simulated cost surfaces for the search of `hwopt tune`: several cards and models, with noise, out-of-memory and crash regions.

The cost model is not that of the planner's forecast: arithmetic reaches its peak only for many tokens, the last wave of blocks
is partly empty, kernels compete with the host's launches, workers with the host for cores, and compilation may be a loss. The
forecast that the search sees is a plain roofline, without all of that. Its memory is wrong by some percent, on every fourth
surface far too small, and every eighth surface has no forecast.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from hwopt.records.throughput import Window
from hwopt.trials.search import Axis, Forecast, Measurement, Search, Setting

GPUS = (  # (GiB, TFLOP/s in half precision, GB/s)
    (7.78, 40.6, 448),
    (14.56, 65.0, 320),
    (23.7, 71.0, 936),
    (23.64, 165.0, 1008),
    (39.5, 312.0, 1555),
    (79.1, 989.0, 3350),
)
MODELS = (  # (parameters, layers, hidden)
    (22.7e6, 6, 384),
    (109.5e6, 12, 768),
    (335e6, 24, 1024),
    (1.0e9, 26, 1152),
)
KINDS = ("all", "second", "selective", "off")
RECOMPUTED = {"off": 0.0, "selective": 0.12, "second": 0.5, "all": 1.0}
"""Part of the forward pass that is computed twice."""
KEPT = {"off": 1.0, "selective": 0.5, "second": 0.6, "all": 0.15}
"""Part of the activations that is stored."""
COMPILED = ("off", "block", "model")
KERNELS = ("first", "second", "third")
WINDOWS = 10
GIB = 1024**3


def sizes_of(step: int) -> list[int]:
    """The rows of micro-batches that split `step` rows, as the batch plugin offers them."""
    numbers = {count for power in range(10) for count in (1 << power, 3 << power) if count <= step} | {step}
    return sorted({-(-step // number) for number in numbers})


@dataclass(frozen=True)
class Cost:
    """The true cost of a step without its input."""

    seconds: float
    host_seconds: float
    gib: float
    crashes: bool


class Surface:
    """A machine, a model and its data, drawn with `seed`."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.gpu = draw.random() < 0.85
        self.gib, self.tflops, self.bandwidth = draw.choice(GPUS) if self.gpu else (16.0, draw.uniform(0.1, 0.6), 20.0)
        fitting = [model for model in MODELS if 16 * model[0] / GIB < self.gib - 2]
        self.parameters, self.layers, self.hidden = draw.choice(fitting if self.gpu else MODELS[:2])
        self.width = draw.choice((32, 64, 128, 256, 512))
        self.step = draw.choice((16, 32, 64, 128, 256))
        self.cores = draw.choice((2, 4, 8, 16))
        self.launch = draw.uniform(6e-6, 30e-6)
        self.half_tokens = draw.uniform(200, 6000)  # at which half of the peak is reached
        self.wave = draw.choice((0, 2048, 4096, 8192))
        self.reached = draw.uniform(0.5, 0.8)
        self.cache_rows = draw.choice((4, 8, 16))
        self.recipe_gain = {"off": 1.0, "block": draw.uniform(0.5, 1.0), "model": draw.uniform(0.4, 1.0)}
        self.launch_gain = {"off": 1.0, "block": draw.uniform(0.5, 0.9), "model": draw.uniform(0.3, 0.8)}
        self.compile_loss = {"off": 1.0, "block": draw.choice((1.0, 1.0, 1.05)), "model": draw.choice((1.0, 1.0, 1.0, 1.15))}
        self.crashing = {name for name, odds in (("model", 0.1), ("third", 0.1)) if draw.random() < odds}
        self.kernel_cost = {"first": 1.0, "second": draw.uniform(0.85, 1.4), "third": draw.uniform(0.8, 2.0)}
        self.attention_share = draw.uniform(0.02, 0.08) * self.width / 64
        self.prepare = draw.choice((1e-5, 5e-5, 2e-4, 1e-3, 3e-3)) * draw.uniform(0.5, 2)  # core seconds of a row
        self.jitter = draw.uniform(0.0, 0.1)
        self.error = draw.uniform(0.88, 1.06)  # below 1, the planner lets settings pass that run out of memory
        if seed % 4 == 3:  # memory that other programs hold: many settings that fit by the forecast run out of it
            self.error *= 0.75
        self.has_forecast = seed % 8 != 5
        self.process_noise = draw.uniform(0.001, 0.008)
        self.window_noise = draw.uniform(0.003, 0.02)
        self.rows = sizes_of(self.step)
        self.workers = sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16) if n <= self.cores})
        self.prefetch = (2, 4, 8)
        self.window_samples = [self.step * 10 * draw.uniform(0.98, 1.02) for _ in range(WINDOWS)]
        self.cost = lru_cache(maxsize=None)(self._cost)
        self.start = self.first_setting()

    def first_setting(self) -> Setting:
        """The setting of a profile: it fits, with or without checkpointing, and often leaves memory free."""
        draw = self.draw
        kernel, compiled = 0, draw.choice((0, 0, 0, 0, 1))
        workers = self.workers.index(draw.choice([n for n in self.workers if n <= 4]))
        for kind in [*draw.sample((0, 3), 2), 0]:
            fitting = [number for number, rows in enumerate(self.rows) if self.runs(rows, KINDS[kind])]
            if fitting:
                return (draw.choice(fitting), workers, 0, kind, compiled, kernel)
        return (0, workers, 0, 0, compiled, kernel)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        rows, workers, prefetch, kind, compiled, kernel = self.start
        return (
            Axis(len(self.rows), rows, ordered=True, values=tuple(self.rows)),
            Axis(len(self.workers), workers, ordered=True, input=True, parallel=True, values=tuple(self.workers)),
            Axis(len(self.prefetch), prefetch, ordered=True, input=True, values=self.prefetch),
            Axis(len(KINDS), kind, ordered=True),
            Axis(len(COMPILED), compiled),
            Axis(len(KERNELS), kernel),
        )

    # the truth

    def memory(self, rows: int, kind: str) -> float:
        """GiB of the allocator."""
        activations = rows * self.width * self.hidden * self.layers * 34 * KEPT[kind]
        return (16 * self.parameters + activations + rows * self.width * 8 * self.hidden) / GIB

    def _cost(self, rows: int, kind: str, compiled: str, kernel: str) -> Cost:
        full, rest = divmod(self.step, rows)
        parts = [rows] * full + ([rest] if rest else [])
        seconds = host = 0.0
        for part in parts:
            device, launches = self.micro_batch(part, kind, compiled, kernel)
            seconds += max(device, launches) + 0.15 * min(device, launches) * (device < 2 * launches)
            host += launches
        update = 28 * self.parameters / (self.bandwidth * 1e9 * 0.8)
        crashes = compiled in self.crashing or kernel in self.crashing
        return Cost(seconds + update, host, self.memory(rows, kind), crashes)

    def micro_batch(self, rows: int, kind: str, compiled: str, kernel: str) -> tuple[float, float]:
        """(seconds of the device, seconds of the host) for the forward and backward pass of `rows`."""
        tokens = rows * self.width
        passes = 3 + RECOMPUTED[kind]
        filled = tokens / (tokens + self.half_tokens)
        if self.wave:
            waves = tokens / self.wave
            filled *= 1 - 0.15 * (1 - waves / math.ceil(waves))  # only some kernels have blocks of this size
        if not self.gpu:
            filled = 1 / (1 + 0.08 * max(0.0, math.log2(rows / self.cache_rows)) + 0.3 / rows)
        products = 2 * self.parameters * tokens * passes / (self.tflops * 1e12 * self.reached * filled)
        products *= 1 + self.attention_share * (self.kernel_cost[kernel] - 1)
        moved = tokens * self.hidden * self.layers * 2 * 24 * passes / 3 / (self.bandwidth * 1e9) * self.recipe_gain[compiled]
        launches = self.layers * 40 * passes * self.launch * self.launch_gain[compiled]
        return (products + moved) * self.compile_loss[compiled], launches if self.gpu else 0.0

    def seconds(self, setting: Setting) -> tuple[float, float]:
        """(seconds of a step, part of it in which the loop waits for data)."""
        rows, workers, prefetch, kind, compiled, kernel = setting
        cost = self.cost(self.rows[rows], KINDS[kind], COMPILED[compiled], KERNELS[kernel])
        return self.with_input(cost, self.workers[workers], self.prefetch[prefetch])

    def with_input(self, cost: Cost, workers: int, prefetch: int) -> tuple[float, float]:
        work = self.step * self.prepare
        if workers == 0:
            return cost.seconds + work, work / (cost.seconds + work)
        compute = cost.seconds
        if self.gpu:
            crowded = max(0, workers + 1 - self.cores)
            compute += 0.25 * crowded / self.cores * cost.host_seconds
        else:
            compute += work / self.cores + 0.02 * compute * workers / self.cores  # the workers take cores from the model
        ready = work / min(workers, self.cores) * (1 + self.jitter / (workers * prefetch))
        whole = max(compute, ready) + 0.3 * self.jitter * min(compute, ready) / (workers * prefetch)
        return whole, 1 - compute / whole

    def fails(self, setting: Setting) -> str | None:
        rows, _, _, kind, compiled, kernel = setting
        cost = self.cost(self.rows[rows], KINDS[kind], COMPILED[compiled], KERNELS[kernel])
        if cost.crashes:
            return "crash"
        return "out of memory" if cost.gib > self.gib - 0.6 else None

    def best(self) -> float:
        """The seconds of a step with the best of all settings that run and that the planner does not rule out."""
        found = math.inf
        inputs = list(product(self.workers, self.prefetch))
        for rows, kind, compiled, kernel in product(self.rows, KINDS, COMPILED, KERNELS):
            cost = self.cost(rows, kind, compiled, kernel)
            if cost.crashes or not self.runs(rows, kind) or cost.seconds >= found:
                continue
            found = min(found, *(self.with_input(cost, *each)[0] for each in inputs))
        return found

    # what the search sees

    def runs(self, rows: int, kind: str) -> bool:
        """Whether it fits, and the planner says so."""
        return self.memory(rows, kind) <= self.gib - 0.6 and self.fits_forecast(rows, kind)

    def fits_forecast(self, rows: int, kind: str) -> bool:
        return not self.has_forecast or self.memory(rows, kind) * self.error < self.gib - 0.4 - 0.03 * self.gib

    def forecast(self, setting: Setting) -> Forecast:
        rows, _, _, kind, compiled, _ = setting
        size = self.rows[rows]
        if not self.has_forecast:
            return Forecast(str(setting), None)
        peak = self.memory(size, KINDS[kind]) * self.error
        fits = self.fits_forecast(size, KINDS[kind])
        if not self.gpu:
            return Forecast(str(setting), fits, peak)
        tokens, passes = self.step * self.width, 3 + RECOMPUTED[KINDS[kind]]
        products = 2 * self.parameters * tokens * passes / (self.tflops * 1e12)
        moved = tokens * self.hidden * self.layers * 60 / (self.bandwidth * 1e9)
        update = 28 * self.parameters / (self.bandwidth * 1e9)
        launches = math.ceil(self.step / size) * self.layers * 40 * passes * 25e-6
        fast = products + update + (0.0 if compiled else moved)
        slow = max(products / 0.3 + moved / 0.5, launches) + 2 * update
        return Forecast(str(setting), fits, peak, (fast, slow))

    def measure(self, setting: Setting) -> Measurement:
        failure = self.fails(setting)
        if failure is not None:
            return Measurement(failure=failure)
        seconds, wait = self.seconds(setting)
        seconds *= math.exp(self.draw.gauss(0, self.process_noise))
        windows = []
        for number, samples in enumerate(self.window_samples, 1):
            noise = math.exp(self.draw.gauss(0, self.window_noise))
            windows.append(Window(10 * number, 10, seconds * samples / self.step * noise, samples, samples * self.width))
        return Measurement(tuple(windows), wait)


@dataclass(frozen=True)
class Found:
    """What a search found on a surface."""

    seed: int
    trials: int
    regret: float
    """The seconds of the setting found over those of the best one, less 1."""
    gain: float
    """The seconds of the start over those of the setting found."""


def searched(seed: int) -> tuple[Search, Found]:
    surface = Surface(seed)
    search = Search(surface.axes, surface.forecast, surface.measure)
    search.run()
    reached, best = surface.seconds(search.best)[0], surface.best()
    return search, Found(seed, len(search.trials), reached / best - 1, surface.seconds(surface.start)[0] / reached)
