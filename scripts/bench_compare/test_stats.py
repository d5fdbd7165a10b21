"""The statistics against series whose truth is known: noise of every kind, drift, and changes."""

import math
import random
import unittest

from .report import Result
from .stats import LEAST_NOISE, Round, findings, percent, student

CASES, ROUNDS, RUNS = 17, 8, 150


def normal(rng):
    return rng.gauss(0, 0.04)


def heavy(rng):
    """Student's t with two degrees of freedom: its variance is infinite."""
    return 0.03 * rng.gauss(0, 1) / math.sqrt(max(rng.expovariate(1), 1e-9))


def disturbed(rng):
    """A neighbour comes in one of eight measurements and costs up to a half; a small noise besides."""
    return rng.gauss(0, 0.02) + (rng.uniform(0.1, 0.4) if rng.random() < 1 / 8 else 0)


def twofold(rng):
    """Two states of the machine, without any between."""
    return rng.choice([0, 0.08]) + rng.gauss(0, 0.005)


def still(rng):
    """No noise to speak of in most rounds."""
    return 0.0 if rng.random() < 0.6 else rng.gauss(0, 0.05)


# With the share of runs in which some case may be flagged before it is measured again. A median of absolute deviations is no
# good scale of two states; the second look has to do there.
NOISES = {normal: 0.1, heavy: 0.1, disturbed: 0.1, twofold: 0.2, still: 0.1}


def series(rng, noise, rounds=ROUNDS, slower=1.0, drift=0.0):
    """Rounds of a case whose HEAD takes `slower` times BASE's time, on a machine that slows down by `drift` in all and jumps."""
    weather, out = 0.0, []
    for i in range(rounds):
        weather += rng.gauss(0, 0.1)
        now = 1e-3 * math.exp(weather + drift * i / rounds)
        out.append(Round(*(now * f * math.exp(noise(rng)) for f in (1.0, 1.0, slower))))
    return out


def run(rng, noise, slower, drift=0.0):
    """A run as the program makes it: `slower` is that of each changed case; what is flagged is measured again."""
    factors = [*slower, *[1.0] * (CASES - len(slower))]
    first = {i: series(rng, noise, slower=f, drift=drift) for i, f in enumerate(factors)}
    seen = findings(first)
    again = {i: series(rng, noise, 2 * ROUNDS, factors[i], drift) for i in first if seen[i].flagged}
    confirmed = findings(again) if again else {}
    return [Result(i, first[i], seen[i], again.get(i, []), confirmed.get(i)) for i in first]


class Quantiles(unittest.TestCase):
    def test_student_is_that_of_the_tables(self):
        for alpha, df, expected in [
            (0.05, 1, 12.706),
            (0.05, 2, 4.303),
            (0.05, 4, 2.776),
            (0.01, 7, 3.499),
            (0.001, 8, 5.041),
            (0.001, 29, 3.659),
        ]:
            self.assertAlmostEqual(student(alpha, df), expected, places=3)


class Nothing(unittest.TestCase):
    def test_many_cases_rarely_give_a_flag_and_never_a_regression(self):
        for noise, most in NOISES.items():
            for drift in (0.0, 1.0):
                with self.subTest(noise=noise.__name__, drift=drift):
                    rng = random.Random(1)
                    runs = [run(rng, noise, [], drift) for _ in range(RUNS)]
                    flagged = sum(any(r.seen.flagged for r in results) for results in runs)
                    held = sum(any(r.holds() for r in results) for results in runs)
                    self.assertLessEqual(flagged, most * RUNS)
                    self.assertLessEqual(held, 0.02 * RUNS)
                    self.assertFalse(any(r.regressed(15) for results in runs for r in results))

    def test_a_drift_within_the_run_cancels(self):
        rounds = [Round(t, t * 1.001, t * 1.0005) for t in (2.0**i for i in range(ROUNDS))]
        (found,) = findings({"case": rounds}).values()
        self.assertLess(abs(percent(found.change)), 0.1)
        self.assertFalse(found.flagged)

    def test_rounds_that_are_all_alike_do_not_make_noise_zero(self):
        (found,) = findings({"case": [Round(1.0, 1.0, 1.004)] * ROUNDS}).values()
        self.assertEqual(found.noise, LEAST_NOISE)
        self.assertFalse(found.flagged)

    def test_a_case_is_not_believed_much_calmer_than_the_others(self):
        rng = random.Random(3)
        results = {i: series(rng, normal) for i in range(CASES - 1)}
        results["calm"] = [Round(1.0, 1.0, 1.02)] * ROUNDS
        self.assertFalse(findings(results)["calm"].flagged)

    def test_a_null_arm_that_is_off_is_the_noise(self):
        (found,) = findings({"case": [Round(1.0, 1.1, 1.12)] * ROUNDS}).values()
        self.assertGreaterEqual(percent(found.noise), 9.9)
        self.assertFalse(found.flagged)


class Changes(unittest.TestCase):
    def test_a_fifth_slower_is_a_regression(self):
        for noise, least in [(normal, 0.95), (heavy, 0.88), (disturbed, 0.88), (still, 0.95)]:
            with self.subTest(noise=noise.__name__):
                rng = random.Random(2)
                runs = [run(rng, noise, [1.2], drift=0.5) for _ in range(RUNS)]
                self.assertGreaterEqual(sum(results[0].regressed(15) for results in runs), least * RUNS)

    def test_a_few_percent_are_seen_by_more_rounds_and_are_no_regression(self):
        rng = random.Random(4)
        many = {i: series(rng, normal, 60, 1.06 if i == 0 else 1.0) for i in range(CASES)}
        found = findings(many)
        self.assertEqual([i for i in found if found[i].flagged], [0])
        self.assertAlmostEqual(percent(found[0].change), 6, delta=2.5)
        for _ in range(RUNS):
            self.assertFalse(any(r.regressed(15) for r in run(rng, normal, [1.06])))

    def test_what_became_faster_is_told_and_is_no_regression(self):
        rng = random.Random(5)
        results = run(rng, normal, [0.7])
        self.assertTrue(results[0].holds())
        self.assertIn("faster", results[0].verdict(15))
        self.assertFalse(results[0].regressed(15))

    def test_what_is_not_seen_again_does_not_count(self):
        rng = random.Random(6)
        first = {0: series(rng, normal, slower=1.3)}
        again = {0: series(rng, normal, 2 * ROUNDS)}
        result = Result(0, first[0], findings(first)[0], again[0], findings(again)[0])
        self.assertTrue(result.seen.flagged)
        self.assertFalse(result.regressed(15))
        self.assertIn("not confirmed", result.verdict(15))


if __name__ == "__main__":
    unittest.main()
