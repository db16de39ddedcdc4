import numpy as np
import pytest

from spec_jax.drafters.block.calibration import calibrate, calibration_error


def test_the_temperatures_that_made_the_data_are_found():
    rng = np.random.default_rng(0)
    z = rng.normal(0.5, 1.5, (40_000, 3))
    true = np.array([2.0, 0.5, 1.0])
    accepted = rng.random(z.shape) < 1 / (1 + np.exp(-z / true))
    found = calibrate(z, accepted)
    np.testing.assert_allclose(np.log(found), np.log(true), atol=0.25)
    product = lambda t: np.cumprod(1 / (1 + np.exp(-z / t)), axis=1)  # noqa: E731
    right = np.cumprod(accepted, axis=1) > 0
    for d in range(2):
        before = calibration_error(product(np.ones(3))[:, d], right[:, d])
        assert calibration_error(product(found)[:, d], right[:, d]) < 0.5 * before


def test_the_error_is_the_mean_gap_over_bins():
    chance, right = np.array([0.05, 0.15, 0.15, 0.95]), np.array([False, True, False, True])
    assert calibration_error(chance, right) == pytest.approx((0.05 + 0.7 + 0.05) / 4)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="logits: got shape"):
        calibrate(np.zeros((3, 2)), np.zeros((3, 1), bool))
