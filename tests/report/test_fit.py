"""The curve T(N) = a/N + b + c*log2(N): found where it is, and honest about what it cannot know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report.fit import fit_scaling

SIZES = (1, 2, 4, 8, 16, 32, 64)
A100_S = (129686, 65752, 33216, 17104, 8914, 4765, 2640)  # run_results/published/kempner_a100.csv


def test_published_timings_are_a_divided_and_a_fixed_cost() -> None:
    fit = fit_scaling(SIZES, A100_S)
    assert fit is not None
    assert round(fit.divided_s / 90) == 1453
    assert round(fit.fixed_s / 90, 1) == 6.9
    assert fit.per_doubling_s == 0
    assert max(map(abs, fit.residuals_pct)) < 1.4


def test_hidden_largest_size_is_predicted_within_its_interval() -> None:
    fit = fit_scaling(SIZES[:-1], A100_S[:-1])
    assert fit is not None
    interval = fit.predict_interval(64)
    assert interval.low is not None and interval.high is not None
    assert interval.low < 2640 < interval.high
    efficiency = 100 * A100_S[0] / (interval.value * 64)
    assert abs(efficiency - 76.76) < 4


@pytest.mark.parametrize("hidden", range(len(SIZES)))
def test_every_hidden_size_lies_in_its_interval(hidden: int) -> None:
    sizes = [n for i, n in enumerate(SIZES) if i != hidden]
    seconds = [s for i, s in enumerate(A100_S) if i != hidden]
    fit = fit_scaling(sizes, seconds)
    assert fit is not None
    interval = fit.predict_interval(SIZES[hidden])
    assert interval.low is not None and interval.high is not None
    assert interval.low < A100_S[hidden] < interval.high


def test_cost_of_doubling_is_found_where_there_is_one() -> None:
    seconds = [1000 / n + 5 + 3 * np.log2(n) for n in SIZES]
    fit = fit_scaling(SIZES, seconds)
    assert fit is not None
    terms = (fit.divided_s, fit.fixed_s, fit.per_doubling_s)
    assert terms == pytest.approx((1000, 5, 3))


def test_no_cost_of_doubling_is_claimed_from_three_sizes() -> None:
    fit = fit_scaling((1, 2, 4), [100, 60, 45])
    assert fit is not None
    assert fit.per_doubling_s == 0


def test_two_sizes_give_a_curve_without_an_interval() -> None:
    fit = fit_scaling((1, 2), (100.0, 55.0))
    assert fit is not None
    interval = fit.predict_interval(4)
    assert interval.value == pytest.approx(32.5)
    assert (interval.low, interval.high) == (None, None)


def test_one_size_gives_no_curve() -> None:
    assert fit_scaling((2, 2), (50.0, 51.0)) is None


def test_speed_up_above_ideal_gives_no_negative_cost() -> None:
    fit = fit_scaling((1, 2, 4), (100.0, 48.0, 23.0))
    assert fit is not None
    assert fit.fixed_s == 0
    assert fit.divided_s > 0


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1, 1e6),
    st.floats(0, 1e4),
    st.floats(0, 1e3),
    st.integers(2, 8),
    st.integers(0, 10_000),
)
def test_terms_are_never_negative_and_intervals_hold_their_value(
    divided_s: float, fixed_s: float, per_doubling_s: float, count: int, seed: int
) -> None:
    sizes = [2**i for i in range(count)]
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, size=count)
    seconds = [
        (divided_s / n + fixed_s + per_doubling_s * np.log2(n)) * e
        for n, e in zip(sizes, noise, strict=True)
    ]
    fit = fit_scaling(sizes, seconds)
    assert fit is not None
    assert min(fit.divided_s, fit.fixed_s, fit.per_doubling_s) >= 0
    interval = fit.predict_interval(2 * sizes[-1])
    if interval.low is not None and interval.high is not None:
        assert 0 <= interval.low <= interval.value <= interval.high
