//! The key-value pairs of a GGUF file, as typed as they are stored; every refusal names file, key, expected and found.

use super::reader::Reader;
use crate::ConvertError;
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

/// Metadata by key.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    pairs: BTreeMap<String, Value>,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A number or truth value.
    Scalar(Scalar),
    /// Text.
    String(String),
    /// Numbers of one type, as stored.
    Numbers(Numbers),
    /// Texts.
    Strings(Strings),
}

/// A number or truth value.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Scalar {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
}

/// Numbers as they lie in the file: a list of small ones would be many times larger as values.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers {
    kind: Kind,
    bytes: Bytes,
}

/// Texts behind each other, and where each ends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Strings {
    text: String,
    ends: Vec<u32>,
}

/// Types of values, by their number in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;

impl Kind {
    const fn new(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The number in the first bytes of `b`.
    fn read(self, b: &[u8]) -> Scalar {
        let mut wide = [0; 8];
        wide[..self.size()].copy_from_slice(&b[..self.size()]);
        let raw = u64::from_le_bytes(wide);
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Scalar::Unsigned(raw),
            Self::I8 => Scalar::Signed(i64::from(raw as i8)),
            Self::I16 => Scalar::Signed(i64::from(raw as i16)),
            Self::I32 => Scalar::Signed(i64::from(raw as i32)),
            Self::I64 => Scalar::Signed(raw as i64),
            Self::F32 => Scalar::Float(f64::from(f32::from_bits(raw as u32))),
            Self::F64 => Scalar::Float(f64::from_bits(raw)),
            Self::Bool => Scalar::Bool(raw != 0),
        }
    }
}

impl Scalar {
    /// As a count or id.
    pub const fn unsigned(self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) if n >= 0 => Some(n as u64),
            Self::Signed(_) | Self::Float(_) | Self::Bool(_) => None,
        }
    }

    /// As a finite number.
    pub fn float(self) -> Option<f64> {
        match self {
            Self::Float(x) if x.is_finite() => Some(x),
            Self::Unsigned(n) => Some(n as f64),
            Self::Signed(n) => Some(n as f64),
            Self::Float(_) | Self::Bool(_) => None,
        }
    }
}

impl Numbers {
    /// How many.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.kind.size()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Scalar> {
        self.bytes.chunks_exact(self.kind.size()).map(|b| self.kind.read(b))
    }
}

impl Strings {
    /// How many.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start as usize..end as usize])
    }
}

impl Value {
    fn read(r: &mut Reader<'_>, key: &str) -> Result<Self, ConvertError> {
        let number = r.u32(key)?;
        match number {
            STRING => r.string(key).map(Self::String),
            ARRAY => Self::read_array(r, key),
            _ => {
                let kind = Kind::new(number).ok_or_else(|| unknown(r, key, number))?;
                let bytes = r.bytes(kind.size() as u64, key)?;
                Ok(Self::Scalar(kind.read(&bytes)))
            }
        }
    }

    fn read_array(r: &mut Reader<'_>, key: &str) -> Result<Self, ConvertError> {
        let number = r.u32(key)?;
        if number == ARRAY {
            return Err(r.fail(format!("{key}: expected a list of values, found a list of lists")));
        }
        if number == STRING {
            // A length each; the number of bytes bounds the ends to 32 bits.
            let n = r.count(8, key)?;
            let mut strings = Strings { text: String::new(), ends: Vec::with_capacity(n) };
            for _ in 0..n {
                strings.text.push_str(&r.string(key)?);
                strings.ends.push(strings.text.len() as u32);
            }
            return Ok(Self::Strings(strings));
        }
        let kind = Kind::new(number).ok_or_else(|| unknown(r, key, number))?;
        let n = r.count(kind.size() as u64, key)?;
        // Copied: a slice would keep a mapped window alive.
        let bytes = r.bytes((n * kind.size()) as u64, key)?.to_vec().into();
        Ok(Self::Numbers(Numbers { kind, bytes }))
    }
}

fn unknown(r: &Reader<'_>, key: &str, number: u32) -> ConvertError {
    r.fail(format!("{key}: expected a value type of 0 to 12, found {number}"))
}

impl fmt::Display for Value {
    /// Short enough for a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scalar(Scalar::Unsigned(n)) => write!(f, "{n}"),
            Self::Scalar(Scalar::Signed(n)) => write!(f, "{n}"),
            Self::Scalar(Scalar::Float(x)) => write!(f, "{x}"),
            Self::Scalar(Scalar::Bool(b)) => write!(f, "{b}"),
            Self::String(s) if s.chars().nth(60).is_some() => {
                write!(f, "{:?}...", s.chars().take(60).collect::<String>())
            }
            Self::String(s) => write!(f, "{s:?}"),
            Self::Numbers(n) => write!(f, "a list of {} numbers", n.count()),
            Self::Strings(s) => write!(f, "a list of {} texts", s.count()),
        }
    }
}

impl Metadata {
    /// Reads `count` pairs.
    pub(super) fn read(r: &mut Reader<'_>, path: &Path, count: usize) -> Result<Self, ConvertError> {
        let mut pairs = BTreeMap::new();
        for i in 0..count {
            let key = r.string(&format!("key {i} of {count}"))?;
            let value = Value::read(r, &key)?;
            if pairs.contains_key(&key) {
                return Err(r.fail(format!("{key}: expected once, found twice")));
            }
            pairs.insert(key, value);
        }
        Ok(Self { path: path.to_owned(), pairs })
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A refusal of what a key holds.
    pub fn wrong(&self, key: &str, found: impl fmt::Display, expected: &str) -> ConvertError {
        ConvertError::file(&self.path, format!("{key} is {found}, expected {expected}"))
    }

    /// A refusal of a key that is not there.
    pub fn absent(&self, key: &str, expected: &str) -> ConvertError {
        self.wrong(key, "absent", expected)
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.keys().map(String::as_str)
    }

    /// The value of a key, if it is there.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.pairs.get(key)
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// When it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.wrong(key, v, "a text")),
        }
    }

    /// A count or id, if it is there.
    ///
    /// # Errors
    /// When it is something else, or negative.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(v @ Value::Scalar(s)) => {
                s.unsigned().map(Some).ok_or_else(|| self.wrong(key, v, "an integer of 0 or more"))
            }
            Some(v) => Err(self.wrong(key, v, "an integer of 0 or more")),
        }
    }

    /// A finite number, if it is there.
    ///
    /// # Errors
    /// When it is something else.
    pub fn float(&self, key: &str) -> Result<Option<f64>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(v @ Value::Scalar(s)) => {
                s.float().map(Some).ok_or_else(|| self.wrong(key, v, "a finite number"))
            }
            Some(v) => Err(self.wrong(key, v, "a finite number")),
        }
    }

    /// A truth value, if it is there.
    ///
    /// # Errors
    /// When it is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Scalar(Scalar::Bool(b))) => Ok(Some(*b)),
            Some(v) => Err(self.wrong(key, v, "true or false")),
        }
    }

    /// Texts, if they are there.
    ///
    /// # Errors
    /// When it is something else.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Strings(s)) => Ok(Some(s)),
            Some(v) => Err(self.wrong(key, v, "a list of texts")),
        }
    }

    /// Numbers, if they are there.
    ///
    /// # Errors
    /// When it is something else.
    pub fn numbers(&self, key: &str) -> Result<Option<&Numbers>, ConvertError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Numbers(n)) => Ok(Some(n)),
            Some(v) => Err(self.wrong(key, v, "a list of numbers")),
        }
    }
}
