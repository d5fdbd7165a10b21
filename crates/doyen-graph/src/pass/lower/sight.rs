//! Which keys a query sees, from a mask that the graph computes: compared at many lengths with what a ragged batch can
//! express.

use super::probe::{Lengths, Run};
use crate::ir::ValueId;
use doyen_tensor::{DType, Tensor};

/// Which keys of its sequence a query at position `p` sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sight {
    /// Those up to `p`, rather than all.
    pub(super) causal: bool,
    /// Of those the last so many, when limited.
    pub(super) window: Option<usize>,
}

impl Sight {
    /// All keys.
    pub(super) const FULL: Self = Self { causal: false, window: None };

    /// What both let through.
    ///
    /// # Errors
    /// When that cannot be expressed.
    pub(super) fn and(self, other: Self) -> Result<Self, String> {
        let causal = self.causal || other.causal;
        let window = match (self.window, other.window) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        if window.is_some() && !causal {
            return Err("it limits keys to a window that reaches past the query's own".into());
        }
        Ok(Self { causal, window })
    }
}

/// A score this low hides a key: what exporters add is -1e4 or less, the type's lowest number in most cases.
const HIDDEN: f32 = -9999.0;

/// A mask over the last two axes `[queries, keys]`; any others must be alike.
struct Mask {
    keeps: Vec<bool>,
    dims: Vec<usize>,
}

impl Mask {
    fn new(t: &Tensor) -> Result<Self, String> {
        let keeps = match t.dtype() {
            DType::Bool => t.bytes().iter().map(|&b| b != 0).collect(),
            d if d.is_float() => {
                let values = t.to_f32().map_err(|e| e.to_string())?;
                if let Some(v) = values.iter().find(|&&v| v != 0.0 && (v.is_nan() || v > HIDDEN)) {
                    return Err(format!("it adds {v}, which neither shows a key nor hides it"));
                }
                values.into_iter().map(|v| v == 0.0).collect()
            }
            _ => t.to_i64().map_err(|e| e.to_string())?.into_iter().map(|v| v != 0).collect(),
        };
        Ok(Self { keeps, dims: t.shape().to_vec() })
    }

    /// First and last key that query `i` of `lengths` sees.
    ///
    /// # Errors
    /// When these are not consecutive, are none, or differ along another axis.
    fn range(&self, lengths: Lengths, i: usize, short: bool) -> Result<(usize, usize), String> {
        let total = lengths.total();
        let keys = self.dims.last().copied().unwrap_or(1);
        let queries = self.dims.len().checked_sub(2).map_or(1, |a| self.dims[a]);
        let row = if queries == 1 { 0 } else { i };
        let spread = keys == 1 && !(short && total > 1);
        if row >= queries || !(spread || keys == total || (short && keys < total)) {
            return Err(format!(
                "its extents {:?} do not fit {} queries and {total} keys",
                self.dims, lengths.new
            ));
        }
        let step = queries * keys;
        let at = |part: usize, j: usize| {
            let key = if spread { 0 } else { j };
            key < keys && self.keeps[part * step + row * keys + key]
        };
        let parts = self.keeps.len() / step.max(1);
        let seen = |part: usize| (0..total).filter(move |&j| at(part, j));
        let (first, last) = (seen(0).next(), seen(0).next_back());
        let (Some(first), Some(last)) = (first, last) else {
            return Err(format!("it hides all keys from the query at {}", lengths.past + i));
        };
        if seen(0).count() != last - first + 1 {
            return Err(format!("the keys that the query at {} sees are not consecutive", lengths.past + i));
        }
        if (1..parts).any(|p| !seen(p).eq(first..=last)) {
            return Err("it is not the same for all heads".into());
        }
        Ok((first, last))
    }
}

/// The meaning of a mask over all runs that could compute it. `short`: a mask with fewer keys than there are hides the
/// rest.
///
/// # Errors
/// Says how it differs from what can be expressed.
pub(super) fn sight(runs: &[Run<'_>], id: ValueId, short: bool) -> Result<Sight, String> {
    let mut seen = Seen { full: true, causal: true, window: None, widest: 0 };
    let mut any = false;
    for (run, fact) in runs.iter().filter_map(|r| Some((r, r.fact(id)?))) {
        let l = run.lengths;
        let t = fact.constant.as_ref().and_then(|c| c.to_tensor().ok());
        let t = t.ok_or_else(|| format!("it cannot be computed at {} tokens", l.total()))?;
        let mask = Mask::new(&t)?;
        for i in 0..l.new {
            any = true;
            seen.add(l, i, mask.range(l, i, short)?)?;
        }
    }
    if any { seen.result() } else { Err("no length gives it".into()) }
}

/// What is still possible after some queries.
struct Seen {
    full: bool,
    causal: bool,
    window: Option<usize>,
    /// Most keys before its own that a query saw from the first on.
    widest: usize,
}

impl Seen {
    fn add(&mut self, l: Lengths, i: usize, (first, last): (usize, usize)) -> Result<(), String> {
        let at = l.past + i;
        self.full &= first == 0 && last + 1 == l.total();
        self.causal &= last == at;
        if !self.full && !self.causal {
            return Err(format!("the query at {at} of {} sees the keys {first} to {last}", l.total()));
        }
        if first == 0 {
            self.widest = self.widest.max(at + 1);
        } else if *self.window.get_or_insert(at + 1 - first) != at + 1 - first {
            return Err(format!("the query at {at} sees {} keys, others another number", at + 1 - first));
        }
        Ok(())
    }

    fn result(self) -> Result<Sight, String> {
        match self.window {
            Some(w) if w < self.widest => {
                Err(format!("some queries see {w} keys before theirs where others see {}", self.widest))
            }
            _ if self.full => Ok(Sight::FULL),
            window => Ok(Sight { causal: true, window }),
        }
    }
}
