"""The moves of a search: changes of the current setting, each with the gain that is expected of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from hwopt.trials.candidates import LEAST_GAIN, Candidates, Setting, with_choice

LAST = LEAST_GAIN / 4
"""The expected gain of a move that is tried last."""
PLATEAU = LAST / 2
"""A search ends when no move is expected to gain as much."""
WAITS = 0.1
"""From this part of the time in which the loop waits for data, faster arithmetic gains nothing."""
HIDDEN = 0.1
"""The expected gain of arithmetic is multiplied by this if the loop waits for data."""
STEADY, STEEP = 0.1, 0.3
"""After a move along sizes that gained more than STEADY, the opposite direction is not tried. After one that gained more than
STEEP, the next move goes to the largest size that fits."""
MOST_MISSES = 2
"""Exchanges of two sizes that may miss."""
NEAR = 0.003
"""A gain above this that is not clear is combined with others."""


@dataclass(frozen=True)
class Direction:
    """What moves have in common: an axis, with larger sizes (1), smaller sizes (-1), or other choices (0)."""

    axis: int
    sign: int = 0
    less: int | None = None
    """Of an exchange: the axis of which a smaller size makes room."""

    @property
    def grows(self) -> bool:
        return self.sign > 0 or self.less is not None


COMBINED = Direction(-1)
"""Several changes that were tried one by one."""


@dataclass(frozen=True)
class Move:
    """A change of the current setting."""

    setting: Setting
    direction: Direction
    gain: float
    """Expected, as a part of the time."""


class Moves:
    """The moves of `candidates`, and what the last ones gained."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates, self.axes = candidates, candidates.axes
        self.gained: dict[Direction, float] = {}
        """The gain of the last move in a direction that was faster."""
        self.missed: Counter[Direction] = Counter()
        """The moves in a direction that were not, since then."""
        self.near: dict[int, tuple[float, int]] = {}
        """Axis -> (gain, choice) of its best change that was not clearly faster."""

    # what was learned

    def gain(self, direction: Direction, gain: float) -> None:
        """A move was adopted."""
        self.gained[direction] = gain
        self.missed[direction] = 0

    def miss(self, move: Move, now: Setting, ratio: float | None) -> None:
        """A move was not adopted; `ratio`: its speed over that of the setting `now`."""
        self.missed[move.direction] += 1
        changed = [number for number, choice in enumerate(move.setting) if choice != now[number]]
        if len(changed) == 1 and ratio is not None and ratio > 1 + NEAR:
            (number,) = changed
            self.near[number] = max(self.near.get(number, (0.0, 0)), (ratio - 1, move.setting[number]))

    def miss_jump(self, setting: Setting) -> None:
        """The setting that is predicted to be fastest is not faster: neither are the exchanges that it contains."""
        changes = [new - old for new, old in zip(setting, self.candidates.start, strict=True)]
        for less, more in permutations(self.candidates.sizes, 2):
            self.missed[Direction(more, 0, less)] += changes[less] < 0 < changes[more]

    def gain_along(self, number: int, sign: int) -> float:
        """What the last moves to larger (or smaller) sizes of an axis gained, exchanges included."""
        found = (
            gain
            for direction, gain in self.gained.items()
            if direction.axis == number and (direction.sign == sign or (sign > 0 and direction.grows))
        )
        return max(found, default=0.0)

    # what to try next

    def best(self, now: Setting, wait: float) -> Move | None:
        """The move from `now` with the largest expected gain; `wait`: the part of the time in which the loop waits for data."""
        found = max(self.all(now, wait), key=lambda move: move.gain, default=None)
        return found if found is not None and found.gain >= PLATEAU else None

    def all(self, now: Setting, wait: float) -> Iterator[Move]:
        """The moves that are worth a trial."""
        for number, axis in enumerate(self.axes):
            if axis.input:
                yield from self.of_input(number, now, wait)
                continue
            hidden = HIDDEN if wait >= WAITS else 1.0
            for move in self.along(number, now) if axis.ordered else self.to_choices(number, now):
                yield Move(move.setting, move.direction, move.gain * hidden)
        yield from self.exchanges(now)
        yield from self.combination(now)

    def of_input(self, number: int, now: Setting, wait: float) -> Iterator[Move]:
        """More workers gain at most the wait, and are of no use without one; fewer may leave cores to the model."""
        if wait >= LEAST_GAIN:
            yield from self.step(Direction(number, 1), now, 1 + int(4 * wait), wait)
        yield from self.step(Direction(number, -1), now, 1, LAST)

    def along(self, number: int, now: Setting) -> Iterator[Move]:
        """A larger and a smaller size, in larger steps if the last one gained much."""
        for direction in (Direction(number, 1), Direction(number, -1)):
            back = self.gain_along(number, -direction.sign)
            gained = 0.0 if self.missed[direction] else self.gained.get(direction, 0.0)
            stride = self.axes[number].choices if gained >= STEEP else 4 if gained else 1 if back else 2
            yield from self.step(direction, now, stride, None, LAST if back else LEAST_GAIN)

    def step(self, direction: Direction, now: Setting, stride: int, gain: float | None, least: float = 0.0) -> Iterator[Move]:
        """The largest step of up to `stride` sizes in a direction. `gain`: the expected gain; default by the forecast."""
        for distance in range(stride, 0, -1):
            choice = now[direction.axis] + direction.sign * distance
            setting = with_choice(now, direction.axis, choice)
            if 0 <= choice < self.axes[direction.axis].choices and self.candidates.is_worth(setting, now):
                yield self.move(setting, direction, self.expected(setting, now, direction, least) if gain is None else gain)
                return

    def to_choices(self, number: int, now: Setting) -> Iterator[Move]:
        """Other choices of an axis without sizes."""
        for choice in range(self.axes[number].choices):
            setting, direction = with_choice(now, number, choice), Direction(number)
            if self.candidates.is_worth(setting, now):
                yield self.move(setting, direction, self.expected(setting, now, direction, LEAST_GAIN))

    def expected(self, setting: Setting, now: Setting, direction: Direction, least: float) -> float:
        """The predicted gain, or half of what the last move in the direction gained; at least `least`."""
        predicted = self.candidates.predicted_gain(setting, now)
        least = LAST if predicted < -LEAST_GAIN / 2 else least
        return max(predicted, self.gained.get(direction, 0.0) / 2, least)

    def exchanges(self, now: Setting) -> Iterator[Move]:
        """For each two axes of sizes, the most promising larger size that fits only with a smaller size of the other axis.

        An example are larger micro-batches with checkpointing.
        """
        for less, more in permutations(self.candidates.sizes, 2):
            direction = Direction(more, 0, less)
            if self.gain_along(less, 1) >= STEADY or self.missed[direction] >= MOST_MISSES:
                continue
            growth = self.gained.get(Direction(more, 1), 0.0) / 4
            gains = {
                setting: growth * (setting[more] - now[more])
                + self.candidates.predicted_gain(setting, now)
                - self.candidates.smaller_cost(setting, now)
                for setting in self.candidates.exchanged(now, less, more)
            }
            if gains:
                setting = max(gains, key=lambda setting: gains[setting])
                yield self.move(setting, direction, max(gains[setting], LAST))

    def combination(self, now: Setting) -> Iterator[Move]:
        """All changes together that may be a little faster, if there are two or more."""
        near = {number: (gain, choice) for number, (gain, choice) in self.near.items() if choice != now[number]}
        setting = now
        for number, (_, choice) in near.items():
            setting = with_choice(setting, number, choice)
        if len(near) > 1 and self.candidates.is_worth(setting, now):
            yield self.move(setting, COMBINED, sum(gain for gain, _ in near.values()))

    def move(self, setting: Setting, direction: Direction, gain: float) -> Move:
        """A move; each miss in its direction halves its expected gain."""
        return Move(setting, direction, gain / 2 ** self.missed[direction])
