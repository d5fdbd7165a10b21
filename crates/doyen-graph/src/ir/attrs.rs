//! Node attributes, and the reader operators parse themselves from.

use crate::ops::OpError;
use doyen_tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// The largest count that an attribute may say, far beyond any model's: sums and products of a few of them fit anywhere.
pub const MOST: usize = 1 << 20;

/// An attribute value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Attr {
    Int(i64),
    Float(f32),
    Str(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Strs(Vec<String>),
    Tensor(Tensor),
    /// A kind this runtime has no use for (graphs, sparse tensors, types), by name.
    Other(&'static str),
}

impl Attr {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "string",
            Self::Ints(_) => "ints",
            Self::Floats(_) => "floats",
            Self::Strs(_) => "strings",
            Self::Tensor(_) => "tensor",
            Self::Other(k) => k,
        }
    }
}

macro_rules! from {
    ($($ty:ty => $variant:ident),* $(,)?) => {$(
        impl From<$ty> for Attr {
            fn from(v: $ty) -> Self {
                Self::$variant(v.into())
            }
        }
    )*};
}
from!(i64 => Int, f32 => Float, &str => Str, String => Str, Vec<i64> => Ints, Vec<f32> => Floats, Tensor => Tensor);

/// The attributes of a node by name.
///
/// Operators read them through the typed getters, which name the attribute in every error and remember what was
/// read; [`Attrs::finish`] then refuses what nobody asked for.
#[derive(Debug, Clone, Default)]
pub struct Attrs {
    map: BTreeMap<String, Attr>,
    read: BTreeSet<&'static str>,
}

impl PartialEq for Attrs {
    fn eq(&self, other: &Self) -> bool {
        self.map == other.map
    }
}

impl<const N: usize> From<[(&str, Attr); N]> for Attrs {
    fn from(pairs: [(&str, Attr); N]) -> Self {
        Self { map: pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(), read: BTreeSet::new() }
    }
}

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident, $variant:ident, $ty:ty) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// When the attribute is of another kind.
        pub fn $name(&mut self, name: &'static str) -> Result<Option<$ty>, OpError> {
            self.read.insert(name);
            match self.map.get(name) {
                None => Ok(None),
                Some(Attr::$variant(v)) => Ok(Some(v.clone())),
                Some(other) => Err(OpError::attribute(name, Attr::kind_name(stringify!($variant)), other.kind())),
            }
        }
    };
}

impl Attr {
    fn kind_name(variant: &str) -> &'static str {
        match variant {
            "Int" => "an int",
            "Float" => "a float",
            "Str" => "a string",
            "Ints" => "a list of ints",
            "Floats" => "a list of floats",
            "Tensor" => "a tensor",
            _ => "a list of strings",
        }
    }
}

impl Attrs {
    /// Sets an attribute.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<Attr>) -> &mut Self {
        self.map.insert(name.into(), value.into());
        self
    }

    /// Name and value of every attribute, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attr)> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }

    getter!(
        /// An int attribute.
        int, Int, i64);
    getter!(
        /// A float attribute as it is.
        any_float, Float, f32);
    getter!(
        /// A string attribute.
        string, Str, String);
    getter!(
        /// A list of ints.
        ints, Ints, Vec<i64>);
    getter!(
        /// A list of floats.
        floats, Floats, Vec<f32>);
    getter!(
        /// A tensor attribute.
        tensor, Tensor, Tensor);

    /// A float attribute. NaN means nothing anywhere.
    ///
    /// # Errors
    /// When the attribute is of another kind, or NaN.
    pub fn float(&mut self, name: &'static str) -> Result<Option<f32>, OpError> {
        self.float_where(name, "a number", |v| !v.is_nan())
    }

    /// A float attribute that is a finite number.
    ///
    /// # Errors
    /// When it is something else.
    pub fn finite(&mut self, name: &'static str) -> Result<Option<f32>, OpError> {
        self.float_where(name, "a finite number", f32::is_finite)
    }

    /// A float attribute that is a finite number of 0 or more.
    ///
    /// # Errors
    /// When it is something else.
    pub fn not_negative(&mut self, name: &'static str) -> Result<Option<f32>, OpError> {
        self.float_where(name, "a finite number of 0 or more", |v| v.is_finite() && v >= 0.0)
    }

    fn float_where(
        &mut self,
        name: &'static str,
        expected: &str,
        fits: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, OpError> {
        match self.any_float(name)? {
            Some(v) if !fits(v) => Err(OpError::attribute(name, expected, v)),
            v => Ok(v),
        }
    }

    /// An int that counts `what` (heads, say): 1 to `MOST`.
    ///
    /// # Errors
    /// When it is less or more.
    pub fn count(&mut self, name: &'static str, what: &str) -> Result<Option<usize>, OpError> {
        let Some(v) = self.int(name)? else { return Ok(None) };
        let count = usize::try_from(v).ok().filter(|n| (1..=MOST).contains(n));
        count.map(Some).ok_or_else(|| OpError::attribute(name, format!("1 to {MOST} {what}"), v))
    }

    /// A required [`Attrs::count`].
    ///
    /// # Errors
    /// When it is absent, less or more.
    pub fn required_count(&mut self, name: &'static str, what: &str) -> Result<usize, OpError> {
        let missing = || OpError::attribute(name, format!("1 to {MOST} {what} (required)"), "nothing");
        self.count(name, what)?.ok_or_else(missing)
    }

    /// An int that must be 0 or 1, with a default.
    ///
    /// # Errors
    /// When it is something else.
    pub fn flag(&mut self, name: &'static str, default: bool) -> Result<bool, OpError> {
        match self.int(name)? {
            None => Ok(default),
            Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(v) => Err(OpError::attribute(name, "0 or 1", v)),
        }
    }

    /// A required int.
    ///
    /// # Errors
    /// When it is absent or of another kind.
    pub fn required_int(&mut self, name: &'static str) -> Result<i64, OpError> {
        self.int(name)?.ok_or_else(|| OpError::attribute(name, "an int (required)", "nothing"))
    }

    /// Accepts an attribute without looking at it (documentation strings, hints without effect).
    pub fn ignore(&mut self, name: &'static str) {
        self.read.insert(name);
    }

    /// Refuses attributes that no getter asked for.
    ///
    /// # Errors
    /// Names the first unknown attribute.
    pub fn finish(&self) -> Result<(), OpError> {
        match self.map.keys().find(|k| !self.read.contains(k.as_str())) {
            None => Ok(()),
            Some(name) => Err(OpError::unknown_attribute(name)),
        }
    }
}
