//! What a run of cases came to: per case, per operator, as text and as JSON.

use serde::Serialize;
use std::{collections::BTreeMap, fmt};

/// What became of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "detail", rename_all = "snake_case")]
pub enum Verdict {
    /// As expected.
    Passed,
    /// Not as expected, and why.
    Failed(String),
    /// Not demanded: the exception's reason.
    Skipped(String),
}

/// A case with its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Case name.
    pub case: String,
    /// Operator under test.
    pub op: String,
    /// Its verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// The outcomes of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Backend name.
    pub backend: String,
    /// By case name.
    pub cases: Vec<Outcome>,
}

/// Passed, failed, skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
}

impl Counts {
    const fn add(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(_) => self.failed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Report {
    /// Totals.
    pub fn counts(&self) -> Counts {
        self.cases.iter().fold(Counts::default(), |mut c, o| {
            c.add(&o.verdict);
            c
        })
    }

    /// Totals per operator, by name.
    pub fn per_operator(&self) -> BTreeMap<&str, Counts> {
        let mut out: BTreeMap<&str, Counts> = BTreeMap::new();
        for o in &self.cases {
            out.entry(&o.op).or_default().add(&o.verdict);
        }
        out
    }

    /// Cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.cases.iter().filter_map(|o| match &o.verdict {
            Verdict::Failed(why) => Some((o.case.as_str(), why.as_str())),
            _ => None,
        })
    }

    /// Backend, counts, counts per operator and every case.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "backend": self.backend,
            "counts": self.counts(),
            "operators": self.per_operator(),
            "cases": self.cases,
        })
    }
}

/// Failures, then operators, then the closing line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (case, why) in self.failures() {
            writeln!(f, "FAILED {case}: {why}")?;
        }
        let operators = self.per_operator();
        let width = operators.keys().map(|o| o.len()).max().unwrap_or(0);
        for (op, counts) in operators {
            writeln!(f, "{op:width$}  {counts}")?;
        }
        writeln!(f, "{}", self.counts())
    }
}
