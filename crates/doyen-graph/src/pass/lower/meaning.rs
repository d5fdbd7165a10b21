//! What a value that depends on lengths alone means, by comparing it at many lengths with the meanings that ragged
//! batches can express.

use super::probe::{Lengths, Run};
use crate::ir::ValueId;
use doyen_tensor::Tensor;

/// The meanings.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Meaning {
    /// The same at every length.
    Constant(Tensor),
    /// `past + new - 1`, `[1]` or `[1, 1]`: what GroupQueryAttention calls `seqlens_k`.
    LastPosition,
    /// `past + new`.
    Total,
    /// The positions of the new tokens, `[1, new]`.
    Positions,
    /// Integers, each a constant plus a multiple of the new tokens: extents of values that carry tokens.
    Extents,
    /// None of these; says what was found.
    Other(String),
}

/// The meaning of a value over all runs that could compute it.
pub(super) fn meaning(runs: &[Run<'_>], id: ValueId) -> Meaning {
    let mut samples: Vec<(Lengths, Tensor)> = Vec::with_capacity(runs.len());
    // A run that failed says nothing: the export does not run there either.
    for (run, fact) in runs.iter().filter_map(|r| Some((r, r.fact(id)?))) {
        let Some(t) = fact.constant.as_ref().and_then(|c| c.to_tensor().ok()) else {
            let total = run.lengths.total();
            return Meaning::Other(format!("a value that cannot be computed at {total} tokens"));
        };
        samples.push((run.lengths, t));
    }
    let Some((_, first)) = samples.first() else {
        return Meaning::Other("a value that no length gives".into());
    };
    let all = |rule: &dyn Fn(Lengths, &Tensor) -> bool| samples.iter().all(|(l, t)| rule(*l, t));
    if all(&|_, t| t == first) {
        return Meaning::Constant(first.clone());
    }
    if all(&|l, t| (1..=2).contains(&t.shape().len()) && ints(t) == [l.total() as i64 - 1]) {
        return Meaning::LastPosition;
    }
    if all(&|l, t| t.shape().len() <= 1 && ints(t) == [l.total() as i64]) {
        return Meaning::Total;
    }
    if all(&is_positions) {
        return Meaning::Positions;
    }
    if is_extents(&samples) {
        return Meaning::Extents;
    }
    Meaning::Other(describe(&samples))
}

/// Integer elements; empty for other types.
fn ints(t: &Tensor) -> Vec<i64> {
    t.to_i64().unwrap_or_default()
}

fn is_positions(l: Lengths, t: &Tensor) -> bool {
    t.shape().dims() == [1, l.new] && ints(t).into_iter().eq(l.past as i64..l.total() as i64)
}

fn is_extents(samples: &[(Lengths, Tensor)]) -> bool {
    let values: Vec<(i64, Vec<i64>)> = samples.iter().map(|(l, t)| (l.new as i64, ints(t))).collect();
    let Some((n0, v0)) = values.first() else { return false };
    if v0.is_empty() || values.iter().any(|(_, v)| v.len() != v0.len()) || samples[0].1.shape().len() > 1 {
        return false;
    }
    let Some((n1, v1)) = values.iter().find(|(n, _)| n != n0) else { return false };
    (0..v0.len()).all(|i| {
        let rise = v1[i] - v0[i];
        let run = n1 - n0;
        rise % run == 0 && values.iter().all(|(n, v)| v[i] == v0[i] + rise / run * (n - n0))
    })
}

fn describe(samples: &[(Lengths, Tensor)]) -> String {
    /// Elements to print.
    const SHOWN: usize = 8;
    let shown = samples.iter().find(|(l, _)| l.past > 1 && l.new > 1).unwrap_or(&samples[0]);
    let (l, t) = shown;
    let values = match (t.to_i64(), t.to_f32()) {
        (Ok(v), _) => format!("{:?}", &v[..v.len().min(SHOWN)]),
        (_, Ok(v)) => format!("{:?}", &v[..v.len().min(SHOWN)]),
        _ => String::new(),
    };
    format!("{t:?} starting {values} after {} cached tokens with {} new ones", l.past, l.new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_affine_in_the_new_tokens() {
        let sample = |past: usize, new: usize, v: &[i64]| {
            (Lengths::new(past, new), Tensor::from_slice([v.len()], v).unwrap())
        };
        assert!(is_extents(&[
            sample(0, 3, &[1, 3, 12]),
            sample(4, 5, &[1, 5, 20]),
            sample(1, 1, &[1, 1, 4])
        ]));
        assert!(!is_extents(&[sample(0, 3, &[3]), sample(4, 5, &[9]), sample(1, 1, &[2])]));
        assert!(!is_extents(&[sample(0, 3, &[3]), sample(4, 5, &[5]), sample(0, 70, &[64])]));
    }
}
