//! Slice: a strided window per axis.

use super::strided::{Offsets, strides, take};
use super::util::{
    INDICES, at_most, check_type, constant_ints, fact, normalize_input_axis, optional, output_of, required,
};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{Shape, Tensor};

/// Windows given by attributes (before opset 10) or by inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slice {
    /// Starts, ends and axes as attributes; every step is 1.
    Attributes {
        /// First index per listed axis.
        starts: Vec<i64>,
        /// One past the last index per listed axis.
        ends: Vec<i64>,
        /// The axes; without them the first ones in order.
        axes: Option<Vec<i64>>,
    },
    /// Inputs `starts`, `ends`, `axes`, `steps`.
    Inputs,
}

/// From here on an end means "to the end" whatever the extent: what exporters write.
const OPEN_END: i64 = i32::MAX as i64;

/// The window of one axis; the values are as written, `None` where not constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    axis: usize,
    start: Option<i64>,
    end: Option<i64>,
    step: Option<i64>,
}

impl Window {
    /// First index and number of elements in an axis of this extent, numpy's rule.
    fn resolve(start: i64, end: i64, step: i64, extent: usize) -> (usize, usize) {
        let (n, step) = (extent as i128, i128::from(step));
        let wrap = |v: i64| if v < 0 { i128::from(v) + n } else { i128::from(v) };
        let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let (start, end) = (wrap(start).clamp(low, high.max(low)), wrap(end).clamp(low, high.max(low)));
        let span = if step > 0 { end - start } else { start - end };
        let count = if span <= 0 { 0 } else { (span + step.abs() - 1) / step.abs() };
        (start.max(0) as usize, count as usize)
    }

    /// Whether every index of the axis is taken in order, whatever its extent.
    fn is_everything(self) -> bool {
        self.start == Some(0) && self.step == Some(1) && self.end.is_some_and(|e| e >= OPEN_END)
    }

    fn dim(self, along: &Dim) -> Dim {
        match (along, self.start, self.end, self.step) {
            (Dim::Known(n), Some(start), Some(end), Some(step)) => {
                Dim::Known(Self::resolve(start, end, step, *n).1)
            }
            (d, ..) if self.is_everything() => d.clone(),
            _ => Dim::Unknown,
        }
    }
}

/// A list that may be absent, unknown or known.
#[derive(Debug)]
enum List {
    Absent,
    Unknown(Option<usize>),
    Known(Vec<i64>),
}

impl List {
    fn of_input(name: &str, input: Option<&Fact>) -> Result<Self, OpError> {
        let Some(input) = input else { return Ok(Self::Absent) };
        check_type(name, input, INDICES)?;
        Ok(match constant_ints(name, input)? {
            Some(list) => Self::Known(list),
            None => Self::Unknown(input.shape.as_ref().and_then(|s| s.first().map_or(Some(1), Dim::known))),
        })
    }

    fn of_traced(name: &str, input: Option<Traced<'_>>) -> Result<Self, OpError> {
        let Some(input) = input else { return Ok(Self::Absent) };
        Ok(match input.constant {
            Some(c) => Self::of_input(name, Some(&Fact::from(std::sync::Arc::new(c.clone()))))?,
            None => Self::Unknown(Some(input.shape.first().copied().unwrap_or(1))),
        })
    }

    const fn len(&self) -> Option<usize> {
        match self {
            Self::Absent => None,
            Self::Unknown(n) => *n,
            Self::Known(list) => Some(list.len()),
        }
    }

    fn get(&self, i: usize) -> Option<i64> {
        match self {
            Self::Known(list) => list.get(i).copied(),
            _ => None,
        }
    }
}

impl Slice {
    fn lists(&self, inputs: &[Option<&Fact>]) -> Result<[List; 4], OpError> {
        Ok(match self {
            Self::Attributes { starts, ends, axes } => [
                List::Known(starts.clone()),
                List::Known(ends.clone()),
                axes.clone().map_or(List::Absent, List::Known),
                List::Absent,
            ],
            Self::Inputs => [
                List::of_input("starts", Some(required(inputs, 1, "starts")?))?,
                List::of_input("ends", Some(required(inputs, 2, "ends")?))?,
                List::of_input("axes", optional(inputs, 3))?,
                List::of_input("steps", optional(inputs, 4))?,
            ],
        })
    }

    /// The windows, or `None` when it is not known which axes are cut.
    fn windows(lists: &[List; 4], rank: usize) -> Result<Option<Vec<Window>>, OpError> {
        let [starts, ends, axes, steps] = lists;
        let Some(n) = starts.len() else { return Ok(None) };
        for (name, list) in [("ends", ends), ("axes", axes), ("steps", steps)] {
            if list.len().is_some_and(|m| m != n) {
                let found = list.len().unwrap_or(0);
                return Err(OpError::input(name, format!("{n} values, one for each of starts"), found));
            }
        }
        if matches!(axes, List::Unknown(_)) {
            return Ok(None);
        }
        if n > rank {
            return Err(OpError::input("starts", format!("at most {rank} values, the rank of data"), n));
        }
        let mut windows: Vec<Window> = Vec::with_capacity(n);
        for i in 0..n {
            let axis = match axes.get(i) {
                Some(a) => normalize_input_axis("axes", a, rank)?,
                None => i,
            };
            if windows.iter().any(|w| w.axis == axis) {
                return Err(OpError::input("axes", "each axis once", format!("axis {axis} twice")));
            }
            let step = if matches!(steps, List::Absent) { Some(1) } else { steps.get(i) };
            if step == Some(0) {
                return Err(OpError::input("steps", "steps other than 0", 0));
            }
            windows.push(Window { axis, start: starts.get(i), end: ends.get(i), step });
        }
        Ok(Some(windows))
    }
}

impl OpDef for Slice {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if opset >= 10 {
            return Ok(Self::Inputs);
        }
        let list = |v: Option<Vec<i64>>, name| {
            v.ok_or_else(|| OpError::attribute(name, "a list of ints (required)", "nothing"))
        };
        Ok(Self::Attributes {
            starts: list(attrs.ints("starts")?, "starts")?,
            ends: list(attrs.ints("ends")?, "ends")?,
            axes: attrs.ints("axes")?,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if *self == Self::Inputs { 5 } else { 1 })?;
        let x = required(inputs, 0, "data")?;
        let lists = self.lists(inputs)?;
        let shape = match &x.shape {
            None => None,
            Some(s) => Some(match Self::windows(&lists, s.len())? {
                None => vec![Dim::Unknown; s.len()],
                Some(windows) => {
                    let mut out = s.clone();
                    for w in windows {
                        out[w.axis] = w.dim(&s[w.axis]);
                    }
                    out
                }
            }),
        };
        Ok(vec![fact(x.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "data")?;
        let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(super::util::fact_of)).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let mut steps = strides(x.shape());
        let mut first = 0usize;
        for w in Self::windows(&self.lists(&facts)?, x.shape().len())?.unwrap_or_default() {
            let (Some(start), Some(end), Some(step)) = (w.start, w.end, w.step) else {
                return Err(OpError::other("starts, ends and steps must be given"));
            };
            let (begin, count) = Window::resolve(start, end, step, x.shape()[w.axis]);
            if count > 0 {
                first += begin * steps[w.axis] as usize;
            }
            // With one element or none the step is never taken, and might overflow.
            steps[w.axis] = if count > 1 { steps[w.axis] * step as isize } else { 0 };
        }
        let walk = Offsets::new(&shape, steps, first);
        Ok(vec![take(x, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "starts"), (2, "ends"), (3, "axes"), (4, "steps")])?;
        let Some(Some(Traced { trace: Trace::Tokens(a), shape, .. })) = inputs.first() else {
            return Ok(vec![Trace::Absent]);
        };
        let at = |i: usize| inputs.get(i).copied().flatten();
        let lists = match self {
            Self::Attributes { .. } => self.lists(&[]),
            Self::Inputs => List::of_traced("starts", at(1)).and_then(|starts| {
                Ok([
                    starts,
                    List::of_traced("ends", at(2))?,
                    List::of_traced("axes", at(3))?,
                    List::of_traced("steps", at(4))?,
                ])
            }),
        }
        .map_err(|e| e.to_string())?;
        let windows = Self::windows(&lists, shape.len())
            .map_err(|e| e.to_string())?
            .ok_or("it is not known which axes it cuts")?;
        if let Some(w) = windows.iter().find(|w| w.axis == a.axis) {
            // An end computed from the length may cover all tokens; a constant one cannot for every length.
            let whole = outputs.first().is_some_and(|o| o.get(a.axis) == shape.get(a.axis));
            let computed = w.start == Some(0) && w.step == Some(1) && w.end.is_none() && whole;
            if !w.is_everything() && !computed {
                return Err(format!("it cuts axis {}, which counts tokens", a.axis));
            }
        }
        Ok(vec![Trace::Tokens(*a)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_tensor::DType;

    fn list(v: &[i64]) -> Tensor {
        Tensor::from_slice([v.len()], v).unwrap()
    }
    fn run(n: usize, start: i64, end: i64, step: i64) -> Result<Vec<i32>, OpError> {
        let x = Tensor::from_slice([n], &(0..n as i32).collect::<Vec<_>>()).unwrap();
        let (s, e, a, t) = (list(&[start]), list(&[end]), list(&[0]), list(&[step]));
        Ok(Slice::Inputs.eval(&[Some(&x), Some(&s), Some(&e), Some(&a), Some(&t)], 1)?[0].to_vec()?)
    }

    /// The reference is the definition: indices of `range(n)[start:end:step]` taken one at a time.
    fn naive(n: i128, start: i64, end: i64, step: i64) -> Vec<i32> {
        let wrap = |v: i64| if v < 0 { i128::from(v) + n } else { i128::from(v) };
        let (mut i, end, step) = (wrap(start), wrap(end), i128::from(step));
        i = if step > 0 { i.max(0) } else { i.min(n - 1) };
        let mut out = Vec::new();
        while (0..n).contains(&i) && if step > 0 { i < end } else { i > end } {
            out.push(i as i32);
            i += step;
        }
        out
    }

    proptest::proptest! {
        #[test]
        fn equals_the_definition(n in 0usize..9, start in -12i64..12, end in -12i64..12, step in -5i64..5) {
            proptest::prop_assume!(step != 0);
            proptest::prop_assert_eq!(run(n, start, end, step).unwrap(), naive(n as i128, start, end, step));
        }
    }

    #[test]
    fn extreme_numbers() {
        assert_eq!(run(3, 0, i64::MAX, 1).unwrap(), [0, 1, 2]);
        assert_eq!(run(3, i64::MAX, i64::MIN, -1).unwrap(), [2, 1, 0]);
        assert_eq!(run(3, -1, i64::MIN, i64::MIN).unwrap(), [2]);
        assert_eq!(run(3, 0, 3, i64::MAX).unwrap(), [0]);
        assert!(run(0, 0, 3, -1).unwrap().is_empty());
        assert!(run(3, 0, 3, 0).unwrap_err().to_string().starts_with("input steps"));
    }

    #[test]
    fn two_axes_one_backwards() {
        let x = Tensor::from_slice([2, 3], &[0i32, 1, 2, 3, 4, 5]).unwrap();
        let (s, e, a, t) = (list(&[-1, 1]), list(&[i64::MIN, 3]), list(&[-1, 0]), list(&[-2, 1]));
        let y = Slice::Inputs.eval(&[Some(&x), Some(&s), Some(&e), Some(&a), Some(&t)], 1).unwrap();
        assert_eq!(y[0].shape().dims(), [1, 2]);
        assert_eq!(y[0].to_vec::<i32>().unwrap(), [5, 3]);
        let twice = list(&[0, 0]);
        assert!(Slice::Inputs.eval(&[Some(&x), Some(&s), Some(&e), Some(&twice)], 1).is_err());
        assert!(Slice::Inputs.eval(&[Some(&x), Some(&s), Some(&list(&[1]))], 1).is_err());
    }

    #[test]
    fn symbolic_extents() {
        let x = Fact::new(DType::F32, ["seq".into(), Dim::Known(8)]);
        let op = |s: i64, e: i64, axis: i64| {
            Slice::Attributes { starts: vec![s], ends: vec![e], axes: Some(vec![axis]) }
                .infer(&[Some(&x)])
                .unwrap()[0]
                .shape_text()
        };
        assert_eq!(op(0, i64::MAX, 0), "[seq,8]");
        assert_eq!(op(1, i64::MAX, 0), "[?,8]");
        assert_eq!(op(-3, i64::MAX, 1), "[seq,3]");
    }
}
