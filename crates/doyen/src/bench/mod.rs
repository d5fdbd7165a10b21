//! Measuring: a whole model ([`model`], on a card [`card`]), the bytes its steps move ([`traffic`]), and the machine it runs on
//! ([`fingerprint`]). Operators alone are measured by `doyen_cpu::bench`; the verbs `bench` and `doctor` print it all.

pub mod card;
pub mod fingerprint;
pub mod model;
pub mod traffic;

use doyen_cpu::bench::Spread;
use serde_json::{Value, json};

/// Quantiles in another unit, as JSON.
pub fn spread(s: &Spread, unit: f64) -> Value {
    json!({
        "median": s.median * unit, "min": s.min * unit, "p25": s.p25 * unit, "p75": s.p75 * unit, "max": s.max * unit,
        "samples": s.samples,
    })
}
