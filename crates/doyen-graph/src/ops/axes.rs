//! Axes that old opsets keep in an attribute and new ones in an input (Squeeze, Unsqueeze, the reductions).

use super::util::{constant_ints, normalize_axis, normalize_input_axis, optional};
use super::{OpError, Traced, token_axis};
use crate::ir::{Attrs, Fact};

/// Where an operator's axes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AxesSource {
    /// The attribute `axes`, if it was given.
    Attribute(Option<Vec<i64>>),
    /// The second input, which is optional for some operators.
    Input,
}

/// Axes as far as they are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Axes {
    /// Not given.
    Default,
    /// Given by an input that is not constant, of this length if that is known.
    Unknown(Option<usize>),
    /// Counted from the front, ascending, none twice.
    Given(Vec<usize>),
}

impl AxesSource {
    /// Reads the attribute in opsets before `since`.
    pub(super) fn parse(opset: i64, since: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(if opset < since { Self::Attribute(attrs.ints("axes")?) } else { Self::Input })
    }

    /// How many inputs an operator with one data input has.
    pub(super) const fn inputs(&self) -> usize {
        match self {
            Self::Attribute(_) => 1,
            Self::Input => 2,
        }
    }

    /// The axes for a tensor of this rank. Without the rank, given axes are as good as unknown.
    pub(super) fn resolve(&self, inputs: &[Option<&Fact>], rank: Option<usize>) -> Result<Axes, OpError> {
        let raw = match self {
            Self::Attribute(None) => return Ok(Axes::Default),
            Self::Attribute(Some(list)) => list.clone(),
            Self::Input => match optional(inputs, 1) {
                None => return Ok(Axes::Default),
                Some(axes) => match constant_ints("axes", axes)? {
                    Some(list) => list,
                    None if axes.rank() == Some(0) => return Ok(Axes::Unknown(Some(1))),
                    None => return Ok(Axes::Unknown(axes.shape.as_ref().and_then(|s| s.first()?.known()))),
                },
            },
        };
        match rank {
            None => Ok(Axes::Unknown(Some(raw.len()))),
            Some(rank) => self.front(&raw, rank).map(Axes::Given),
        }
    }

    /// The axes as the token-axis rule sees them.
    pub(super) fn traced(&self, inputs: &[Option<Traced<'_>>], rank: usize) -> Result<Axes, String> {
        let raw = match self {
            Self::Attribute(None) => return Ok(Axes::Default),
            Self::Attribute(Some(list)) => list.clone(),
            Self::Input => {
                token_axis::none_of(inputs, &[(1, "axes")])?;
                match inputs.get(1).and_then(Option::as_ref) {
                    None => return Ok(Axes::Default),
                    Some(axes) => {
                        let constant = axes.constant.ok_or("its axes are not constant")?;
                        constant.to_tensor().and_then(|t| t.to_i64()).map_err(|e| e.to_string())?
                    }
                }
            }
        };
        self.front(&raw, rank).map(Axes::Given).map_err(|e| e.to_string())
    }

    fn front(&self, raw: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
        let one = |&axis: &i64| match self {
            Self::Attribute(_) => normalize_axis("axes", axis, rank),
            Self::Input => normalize_input_axis("axes", axis, rank),
        };
        let mut list = raw.iter().map(one).collect::<Result<Vec<_>, _>>()?;
        list.sort_unstable();
        match list.windows(2).find(|w| w[0] == w[1]) {
            None => Ok(list),
            Some(w) => {
                let (expected, found) = ("each axis once", format!("axis {} twice", w[0]));
                Err(match self {
                    Self::Attribute(_) => OpError::attribute("axes", expected, found),
                    Self::Input => OpError::input("axes", expected, found),
                })
            }
        }
    }
}
