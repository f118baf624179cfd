"""Where scaling time goes: T(N) = a/N + b + c*log2(N), fitted, with intervals for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

MIN_POINTS = 2  # distinct GPU counts for a and b
MIN_POINTS_FOR_LOG = 4  # one more than the coefficients, so that c can be tested on a hidden point
LOG_GAIN = 0.5  # c is kept only if it at least halves the leave-one-out error

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A prediction and the range that the measured points support; no range from two points."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ScalingFit:
    """Seconds on N GPUs: work that divides, a fixed cost, and a cost of each doubling."""

    divided_s: float
    fixed_s: float
    per_doubling_s: float
    num_gpus: tuple[float, ...]
    seconds: tuple[float, ...]

    def predict(self, num_gpus: float) -> float:
        """Seconds on N GPUs by the fitted curve."""
        terms = np.array([self.divided_s, self.fixed_s, self.per_doubling_s])
        return float(_columns([num_gpus])[0] @ terms)

    @property
    def residuals_pct(self) -> tuple[float, ...]:
        """(fitted - measured) / measured of each point, in per cent."""
        pairs = zip(self.num_gpus, self.seconds, strict=True)
        return tuple(100 * (self.predict(n) / s - 1) for n, s in pairs)

    def predict_interval(self, num_gpus: float) -> Interval:
        """The prediction with its 95 % range, from the fits that leave one point out.

        The spread of those fits is the jackknife's standard error of the curve; the relative
        residuals add the noise of a single measurement.
        """
        value = self.predict(num_gpus)
        hidden = range(len(self.seconds))
        fits = [
            _fit_without(self.num_gpus, self.seconds, i, self.per_doubling_s > 0) for i in hidden
        ]
        predictions = np.array([fit.predict(num_gpus) for fit in fits if fit is not None])
        count = len(predictions)
        if count < len(fits) or count < 3:
            return Interval(value, None, None)
        curve_variance = (count - 1) / count * np.sum((predictions - predictions.mean()) ** 2)
        noise = value * np.sqrt(np.mean(np.square(self.residuals_pct))) / 100
        half_width = _t_quantile(count - 1) * np.sqrt(curve_variance + noise**2)
        return Interval(value, float(max(0.0, value - half_width)), float(value + half_width))


def fit_scaling(num_gpus: Sequence[float], seconds: Sequence[float]) -> ScalingFit | None:
    """The curve with the smallest relative errors and no negative term; None below two sizes."""
    if len(set(num_gpus)) < MIN_POINTS:
        return None
    without_log = _fit_terms(num_gpus, seconds, with_log=False)
    if len(set(num_gpus)) < MIN_POINTS_FOR_LOG:
        return without_log
    with_log = _fit_terms(num_gpus, seconds, with_log=True)
    gain = _hidden_error(num_gpus, seconds, True) / _hidden_error(num_gpus, seconds, False)
    return with_log if with_log.per_doubling_s > 0 and gain < LOG_GAIN else without_log


def _fit_terms(num_gpus: Sequence[float], seconds: Sequence[float], with_log: bool) -> ScalingFit:
    """Non-negative least squares of relative errors: with three terms, try every subset."""
    target = np.asarray(seconds, dtype=float)
    columns = _columns(num_gpus) / target[:, None]
    usable = range(3 if with_log else 2)
    best, best_error = np.zeros(3), np.inf
    for size in range(1, len(usable) + 1):
        for subset in combinations(usable, size):
            terms = np.zeros(3)
            terms[list(subset)] = np.linalg.lstsq(columns[:, subset], np.ones(len(target)))[0]
            error = float(np.sum((columns @ terms - 1) ** 2))
            if np.all(terms >= 0) and error < best_error:
                best, best_error = terms, error
    divided_s, fixed_s, per_doubling_s = (float(term) for term in best)
    return ScalingFit(divided_s, fixed_s, per_doubling_s, tuple(num_gpus), tuple(seconds))


def _columns(num_gpus: Sequence[float]) -> Floats:
    n = np.asarray(num_gpus, dtype=float)
    return np.stack([1 / n, np.ones_like(n), np.log2(n)], axis=1)


def _fit_without(
    num_gpus: Sequence[float], seconds: Sequence[float], hidden: int, with_log: bool
) -> ScalingFit | None:
    """The curve of all points but one, or None when too few sizes are left."""
    rest = [i for i in range(len(num_gpus)) if i != hidden]
    if len({num_gpus[i] for i in rest}) < MIN_POINTS:
        return None
    return _fit_terms([num_gpus[i] for i in rest], [seconds[i] for i in rest], with_log)


def _hidden_error(num_gpus: Sequence[float], seconds: Sequence[float], with_log: bool) -> float:
    """Mean squared relative error of each point as predicted by the others."""
    errors = []
    for index, measured in enumerate(seconds):
        fit = _fit_without(num_gpus, seconds, index, with_log)
        assert fit is not None, "called with at least four sizes"
        errors.append((fit.predict(num_gpus[index]) / measured - 1) ** 2)
    return float(np.mean(errors)) + 1e-12


def _t_quantile(degrees: int) -> float:
    """Student's t for a two-sided 95 % range."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[degrees - 1] if degrees <= len(table) else 2.0 + 2.3 / degrees
