"""The clean-step model: how long a forward pass of this shape takes when nothing is wrong.

    time = c0 + Σ segments of the batch's tokens + a·(prefill × context) + b·(decodes' context)
              + d·sequences

with non-negative coefficients. The batch's tokens enter as a monotone, piecewise linear curve:
a processor that is bound by memory at one token and by arithmetic at a hundred has no one price
per token. Fitted on *clean* steps (less than 5 % known delay) to their lower quartile, since what
is left in a clean step's time is noise that only ever adds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsagent.instrumentation.records import Phase, Share

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
ENOUGH_STEPS = 200
ENOUGH_IN_SEGMENT = 3
KEPT_PER_SEGMENT = 128
REFIT_EVERY = 50  # clean steps, and later an eighth of those seen: fits get rarer as they settle
QUANTILE = 0.25
BAND_QUANTILE = 0.95
LEAST_BAND_RATIO = 0.02  # a fit on few steps knows its own noise too well

Vector = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class Shape(NamedTuple):
    """What a forward pass has to do."""

    tokens: int  # prefill tokens and decodes together
    prefill_context: int  # Σ over prefill chunks of tokens × mean context
    decode_context: int  # Σ over decodes of the tokens they attend to
    sequences: int


def shape(shares: Sequence[Share]) -> Shape:
    tokens = prefill_context = decode_context = 0
    for _, phase, scheduled, _, context, _, _ in shares:
        tokens += scheduled
        if phase is Phase.PREFILL:
            prefill_context += scheduled * (context + scheduled // 2)
        else:
            decode_context += context
    return Shape(tokens, prefill_context, decode_context, len(shares))


_NOTHING = Shape(0, 0, 0, 0)


class Price(NamedTuple):
    """What the model says of one step, and what the step held: computed once, though every
    request in the batch asks for it."""

    whole_ns: int | None  # None: no prediction, this shape is unknown
    decodes_ns: int  # of the decodes alone
    prefills_ns: int  # of the prefills alone
    decode_tokens: int
    prefill_tokens: int
    band_ratio: float
    fitted: bool  # on enough clean steps

    @property
    def most_ns(self) -> int:
        """What a clean step of this shape takes at most: the prediction and its residual band."""
        return round((self.whole_ns or 0) * (1 + self.band_ratio))


_BELOW = (0, *KNOTS)  # where each segment of the curve begins
COEFFICIENTS = 1 + len(_BELOW) + 3


def _segment(tokens: int) -> int:
    return bisect_left(KNOTS, tokens)


def _features(shapes: Sequence[Shape]) -> Vector:
    """One row a shape, one column a coefficient."""
    tokens = np.array([[item.tokens] for item in shapes])
    widths = [*np.diff(_BELOW), np.iinfo(np.int64).max]
    curve = np.clip(tokens - np.array(_BELOW), 0, widths)
    rest = [[item.prefill_context, item.decode_context, item.sequences] for item in shapes]
    return np.hstack([np.ones_like(tokens), curve, rest]).astype(np.float64)


class CleanStepModel:
    """Learns from clean steps; predicts nanoseconds of forward for any shape."""

    def __init__(self) -> None:
        self.clean_steps = 0
        # Clean steps' time by what was normal before (normal.py); None: nothing to compare with.
        self.normal_ratio: float | None = None
        self._rows: dict[int, list[tuple[Shape, float]]] = {}
        self._cursor: dict[int, int] = {}
        self._coefficients: Vector | None = None
        self._prices: list[float] = []
        self._bases: list[float] = []  # of the curve, where each segment begins
        self._band_ratio: float = 0.0
        self._since_fit = 0

    def observe(self, item: Shape, clean_forward_ns: int) -> None:
        """One clean step: its shape, and its forward time less its known delay."""
        if item.tokens <= 0 or clean_forward_ns <= 0:
            return
        # The newest of each size are kept, so that rare long prefills outlive many decodes.
        segment = _segment(item.tokens)
        rows = self._rows.setdefault(segment, [])
        row = (item, float(clean_forward_ns))
        if len(rows) < KEPT_PER_SEGMENT:
            rows.append(row)
        else:
            self._cursor[segment] = (self._cursor.get(segment, 0) + 1) % KEPT_PER_SEGMENT
            rows[self._cursor[segment]] = row
        self.clean_steps += 1
        self._since_fit += 1
        if self._coefficients is None or self._since_fit >= max(REFIT_EVERY, self.clean_steps // 8):
            self._fit()

    def _fit(self) -> None:
        rows = [row for segment in self._rows.values() for row in segment]
        if len(rows) < 2:
            return
        self._since_fit = 0
        features = _features([row[0] for row in rows])
        times = np.array([row[1] for row in rows])
        self._take(quantile_fit(features, times, QUANTILE))
        predicted = np.maximum(features @ np.array(self._prices), 1.0)
        self._band_ratio = max(0.0, float(np.quantile(times / predicted - 1.0, BAND_QUANTILE)))

    def _take(self, coefficients: Vector) -> None:
        self._coefficients = coefficients
        self._prices = coefficients.tolist()
        widths = [high - low for low, high in itertools.pairwise(_BELOW)]
        steps = (price * width for price, width in zip(self._prices[1:], widths, strict=False))
        self._bases = list(itertools.accumulate(steps, initial=self._prices[0]))

    @classmethod
    def of(cls, coefficients: Sequence[float], band_ratio: float) -> CleanStepModel:
        """One that was kept: it predicts, and knows no step."""
        model = cls()
        model._take(np.array(coefficients, np.float64))
        model._band_ratio = band_ratio
        return model

    @property
    def coefficients(self) -> tuple[float, ...]:
        """COEFFICIENTS of them, in nanoseconds; none before any fit."""
        return tuple(self._prices)

    @property
    def rows(self) -> Mapping[int, Sequence[tuple[Shape, float]]]:
        """The clean steps it knows, with their nanoseconds, by the curve's segment."""
        return self._rows

    @property
    def fitted(self) -> bool:
        """On enough clean steps to be believed."""
        return self._coefficients is not None and self.clean_steps >= ENOUGH_STEPS

    def predict_ns(self, item: Shape) -> int | None:
        """The lower-quartile time of a clean forward pass of this shape; None before any fit."""
        if self._coefficients is None:
            return None
        if item.tokens <= 0:
            return 0
        segment = _segment(item.tokens)
        curve = self._bases[segment] + self._prices[segment + 1] * (item.tokens - _BELOW[segment])
        a, b, d = self._prices[-3:]
        total = curve + (a * item.prefill_context + b * item.decode_context)
        return round(total + d * item.sequences)

    def predict_each_ns(
        self, tokens: Whole, prefill_context: Whole, decode_context: Whole
    ) -> Whole | None:
        """`predict_ns` of many passes of one sequence each, to the nanosecond the same."""
        if self._coefficients is None:
            return None
        segment = np.searchsorted(KNOTS, tokens)
        slope, below = self._coefficients[1:-3][segment], np.array(_BELOW)[segment]
        curve = np.array(self._bases)[segment] + slope * (tokens - below)
        a, b, d = self._prices[-3:]
        total = curve + (a * prefill_context + b * decode_context)
        return np.where(tokens > 0, np.rint(total + d), 0).astype(np.int64)

    @property
    def band_ratio(self) -> float:
        """The residual band as a share of the prediction: the 95th percentile of
        (measured − predicted) ÷ predicted over the clean steps it was fitted on."""
        return self._band_ratio

    def knows(self, item: Shape) -> bool:
        """False where a prediction would be a guess: steps of about this size are wanting."""
        return len(self._rows.get(_segment(item.tokens), ())) >= ENOUGH_IN_SEGMENT

    def price(self, shares: Sequence[Share], whole: Shape | None = None) -> Price:
        """Of a step with these shares, of the shape `whole` where that is known already. `fitted`
        only from 200 clean steps on."""
        if whole is None:
            whole = shape(shares)
        alike = {share.phase for share in shares}
        if len(alike) > 1:
            decodes = shape([share for share in shares if share.phase is Phase.DECODE])
            prefills = shape([share for share in shares if share.phase is Phase.PREFILL])
        else:
            decodes, prefills = (whole, _NOTHING) if Phase.DECODE in alike else (_NOTHING, whole)
        whole_ns = self.predict_ns(whole)
        return Price(
            whole_ns if self.knows(whole) else None,
            (whole_ns if decodes is whole else self.predict_ns(decodes)) or 0,
            (whole_ns if prefills is whole else self.predict_ns(prefills)) or 0,
            decodes.tokens,
            prefills.tokens,
            max(self._band_ratio, LEAST_BAND_RATIO),
            self.clean_steps >= ENOUGH_STEPS,
        )


def quantile_fit(features: Vector, times: Vector, quantile: float) -> Vector:
    """Non-negative coefficients of the `quantile` of times given features, by iteratively
    re-weighted least squares on relative error (a long prefill must not drown the decodes)."""
    scaled = features / times[:, None]
    target = np.ones(len(times))
    weights = np.ones(len(times))
    coefficients = np.zeros(features.shape[1])
    for _ in range(8):
        coefficients = nonnegative_least_squares(
            scaled * weights[:, None], target * weights, coefficients
        )
        residual = target - scaled @ coefficients
        side = np.where(residual > 0, quantile, 1.0 - quantile)
        weights = np.sqrt(side / np.maximum(np.abs(residual), 1e-3))
    return coefficients


def nonnegative_least_squares(matrix: Vector, target: Vector, start: Vector) -> Vector:
    """min |matrix·x − target| with x ≥ 0, from `start`, by cyclic coordinate descent on the normal
    equations (Franc, Hlaváč, Navara: Sequential coordinate-wise algorithm for NNLS, 2005)."""
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    used = scale > 0
    scaled = matrix[:, used] / scale[used]
    gram = scaled.T @ scaled
    # Where the data cannot tell the columns apart (only full batches were seen), the fixed cost of
    # a step takes the price: it is what reading the weights costs, whatever the batch.
    gram[np.diag_indices_from(gram)] += np.where(np.flatnonzero(used) == 0, 1e-6, 1e-3)
    # Plain floats: numpy's overhead would be most of the work on so few columns.
    x: list[float] = (start[used] * scale[used]).tolist()
    rows = list(
        zip(gram.tolist(), (scaled.T @ target).tolist(), np.diag(gram).tolist(), strict=True)
    )
    least = 1e-5 * len(target) ** 0.5
    for _ in range(60):
        moved = 0.0
        for i, (row, wanted, own) in enumerate(rows):
            slope = sum(map(mul, row, x)) - wanted
            fresh = x[i] - slope / own
            if fresh > 0.0 or x[i]:
                fresh = max(0.0, fresh)
                moved = max(moved, abs(fresh - x[i]))
                x[i] = fresh
        if moved < least:
            break
    result = np.zeros(matrix.shape[1])
    result[used] = np.array(x) / scale[used]
    return result
