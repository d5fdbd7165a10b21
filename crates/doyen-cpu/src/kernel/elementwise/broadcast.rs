//! numpy's broadcasting of two row-major operands, reduced to as few axes as possible.
//!
//! Made per call without allocating, since the token axis changes from step to step.

/// Axes a broadcast may have after reduction; neighbours that broadcast alike count as one.
const MAX_RANK: usize = 8;

/// Why two shapes do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BroadcastError {
    /// Extents that neither agree nor are 1.
    #[error("extents {a} and {b} do not broadcast (axis {axis} from the end)")]
    Extents {
        /// Extent of the left operand.
        a: usize,
        /// Extent of the right operand.
        b: usize,
        /// The axis, counted from the end.
        axis: usize,
    },
    /// More than eight changes between broadcast and plain axes.
    #[error("more than {MAX_RANK} axes remain after joining those that broadcast alike")]
    Rank,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Axis {
    extent: usize,
    a: usize,
    b: usize,
}

/// How the elements of two operands pair up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broadcast {
    /// Innermost first; the first axis has strides 0 or 1.
    axes: [Axis; MAX_RANK],
    rank: usize,
    sizes: [usize; 3],
}

impl Broadcast {
    /// Pairs row-major operands of these extents.
    ///
    /// # Errors
    /// When the extents do not broadcast.
    pub fn new(a: &[usize], b: &[usize]) -> Result<Self, BroadcastError> {
        let extent = |dims: &[usize], axis: usize| dims.len().checked_sub(axis + 1).map_or(1, |i| dims[i]);
        let mut this = Self { axes: [Axis::default(); MAX_RANK], rank: 0, sizes: [1; 3] };
        let (mut size_a, mut size_b, mut size) = (1, 1, 1);
        for axis in 0..a.len().max(b.len()) {
            let (ea, eb) = (extent(a, axis), extent(b, axis));
            if ea != eb && ea != 1 && eb != 1 {
                return Err(BroadcastError::Extents { a: ea, b: eb, axis });
            }
            let both = if ea == 1 { eb } else { ea };
            if both != 1 {
                let stride = |e: usize, size: usize| if e == 1 { 0 } else { size };
                this.push(Axis { extent: both, a: stride(ea, size_a), b: stride(eb, size_b) })?;
            }
            (size_a, size_b, size) = (size_a * ea, size_b * eb, size * both);
        }
        if this.rank == 0 {
            this.push(Axis { extent: 1, a: 0, b: 0 })?;
        }
        this.sizes = [size_a, size_b, size];
        Ok(this)
    }

    /// Adds the next outer axis, joined with the last one where both operands continue through it.
    fn push(&mut self, axis: Axis) -> Result<(), BroadcastError> {
        if let Some(last) = self.rank.checked_sub(1).map(|i| &mut self.axes[i])
            && axis.a == last.a * last.extent
            && axis.b == last.b * last.extent
        {
            last.extent *= axis.extent;
            return Ok(());
        }
        *self.axes.get_mut(self.rank).ok_or(BroadcastError::Rank)? = axis;
        self.rank += 1;
        Ok(())
    }

    /// Elements of the operands and of the result.
    pub const fn sizes(&self) -> [usize; 3] {
        self.sizes
    }

    /// Length of a run: consecutive results, for which each operand advances by its stride (0 or 1).
    pub(super) const fn run(&self) -> (usize, [usize; 2]) {
        let first = self.axes[0];
        (first.extent, [first.a, first.b])
    }

    /// Number of runs.
    pub(super) fn runs(&self) -> usize {
        self.axes[1..self.rank].iter().map(|a| a.extent).product()
    }

    /// Offsets of the operands at the start of run `i`.
    pub(super) fn offsets(&self, mut i: usize) -> [usize; 2] {
        let mut offsets = [0; 2];
        for axis in &self.axes[1..self.rank] {
            let at = i % axis.extent;
            i /= axis.extent;
            offsets[0] += at * axis.a;
            offsets[1] += at * axis.b;
        }
        offsets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_axes() {
        let b = Broadcast::new(&[2, 3, 4], &[2, 3, 4]).unwrap();
        assert_eq!((b.rank, b.run()), (1, (24, [1, 1])));
        let b = Broadcast::new(&[2, 3, 4], &[4]).unwrap();
        assert_eq!((b.runs(), b.run(), b.sizes()), (6, (4, [1, 1]), [24, 4, 24]));
        let b = Broadcast::new(&[5, 6], &[]).unwrap();
        assert_eq!((b.runs(), b.run()), (1, (30, [1, 0])));
        let b = Broadcast::new(&[5, 1], &[1, 6]).unwrap();
        assert_eq!((b.runs(), b.run(), b.offsets(3)), (5, (6, [0, 1]), [3, 0]));
        assert_eq!(Broadcast::new(&[], &[1, 1]).unwrap().sizes(), [1, 1, 1]);
        assert_eq!(Broadcast::new(&[0, 3], &[1, 3]).unwrap().sizes(), [0, 3, 0]);
    }

    #[test]
    fn refuses_extents_that_disagree() {
        let e = Broadcast::new(&[2, 3], &[3, 3]).unwrap_err();
        assert_eq!(e, BroadcastError::Extents { a: 2, b: 3, axis: 1 });
    }
}
