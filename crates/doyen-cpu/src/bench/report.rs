//! What was measured, and the table of it.

use super::Labels;
use std::fmt;

/// Quantiles of samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// A quarter is at most this.
    pub p25: f64,
    /// Half is at most this.
    pub median: f64,
    /// Three quarters are at most this.
    pub p75: f64,
    /// Largest.
    pub max: f64,
    /// How many samples there were.
    pub samples: usize,
}

impl Spread {
    /// The quantiles of samples; NaN when there are none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let last = samples.len().saturating_sub(1);
        let at = |q: usize| samples.get((last * q + 2) / 4).copied().unwrap_or(f64::NAN);
        Self { min: at(0), p25: at(1), median: at(2), p75: at(3), max: at(4), samples: samples.len() }
    }
}

/// What was measured of a case.
#[derive(Debug, Clone)]
pub struct CaseReport {
    /// What it is called.
    pub labels: Labels,
    /// Multiply-adds of a call.
    pub macs: f64,
    /// Seconds of a call.
    pub seconds: Spread,
    /// Bytes read a second.
    pub rate: Spread,
    /// Its rate over that of the read loop before and after it, call by call.
    pub share: Spread,
}

impl CaseReport {
    /// The labels as one text.
    pub fn name(&self) -> String {
        name(&self.labels)
    }
}

/// Labels as one text.
pub(super) fn name(labels: &Labels) -> String {
    labels.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Report {
    /// Threads of the pool.
    pub threads: usize,
    /// Bytes a second of the read loop.
    pub read: Spread,
    /// The cases, in order.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// Labels that all cases have, of several cases.
    fn common(&self) -> Labels {
        let [first, others @ ..] = self.cases.as_slice() else { return Labels::new() };
        let in_all = |label: &&(&'static str, String)| others.iter().all(|c| c.labels.contains(label));
        if others.is_empty() { Labels::new() } else { first.labels.iter().filter(in_all).cloned().collect() }
    }
}

fn own_name(case: &CaseReport, common: &Labels) -> String {
    name(&case.labels.iter().filter(|label| !common.contains(label)).cloned().collect())
}

impl fmt::Display for Report {
    /// What all cases have in common, then a table: times with their spread, rate, share of the read loop with its
    /// quartiles, multiply-adds a second.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let common = self.common();
        if !common.is_empty() {
            writeln!(f, "{}", name(&common))?;
        }
        let names: Vec<String> = self.cases.iter().map(|c| own_name(c, &common)).collect();
        let width = names.iter().map(String::len).max().unwrap_or(0).max(4);
        let Spread { min, median, max, .. } = self.read;
        writeln!(
            f,
            "read loop, {} thread{}: median {:.1} GB/s ({:.1} to {:.1})",
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            median / 1e9,
            min / 1e9,
            max / 1e9
        )?;
        writeln!(
            f,
            "{:width$} {:>9} {:>9} {:>9} {:>7} {:>8} {:>12} {:>8} {:>7}",
            "case", "median ms", "min", "max", "GB/s", "of read", "quartiles", "GMAC/s", "samples"
        )?;
        for (c, name) in self.cases.iter().zip(names) {
            writeln!(
                f,
                "{name:width$} {:>9.3} {:>9.3} {:>9.3} {:>7.1} {:>7.0}% {:>4.0}% to {:>3.0}% {:>8.1} {:>7}",
                1e3 * c.seconds.median,
                1e3 * c.seconds.min,
                1e3 * c.seconds.max,
                c.rate.median / 1e9,
                100.0 * c.share.median,
                100.0 * c.share.p25,
                100.0 * c.share.p75,
                c.macs / c.seconds.median / 1e9,
                c.seconds.samples,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_that_all_cases_share_are_said_once() {
        let one = Spread::of(vec![1.0]);
        let case = |m: &str| CaseReport {
            labels: vec![("m", m.to_owned()), ("bits", "4".to_owned())],
            macs: 1.0,
            seconds: one,
            rate: one,
            share: one,
        };
        let report = Report { threads: 2, read: one, cases: vec![case("1"), case("8")] };
        let text = report.to_string();
        assert_eq!(text.matches("bits=4").count(), 1, "{text}");
        assert!(text.lines().any(|l| l.starts_with("m=8 ")), "{text}");
        assert_eq!(Report { cases: vec![case("1")], ..report }.to_string().matches("m=1 bits=4").count(), 1);
    }

    #[test]
    fn quantiles() {
        let s = Spread::of(vec![5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!((s.min, s.p25, s.median, s.p75, s.max, s.samples), (1.0, 2.0, 3.0, 4.0, 5.0, 5));
        let s = Spread::of(vec![7.0]);
        assert_eq!((s.min, s.median, s.max), (7.0, 7.0, 7.0));
        assert!(Spread::of(Vec::new()).median.is_nan());
    }
}
