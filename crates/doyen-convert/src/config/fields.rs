//! Typed access to a JSON object; every error names field, value and what would be accepted.

use crate::ConvertError;
use serde_json::{Map, Value};
use std::{cell::RefCell, collections::BTreeSet, path::Path, rc::Rc};

/// The fields of a JSON object. `null` is the same as absent. Remembers which were asked for.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    prefix: String,
    /// Shared with the copies that stand for the same object.
    read: Rc<RefCell<BTreeSet<String>>>,
}

/// The value of a field that a file leaves out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Given {
    Count(u64),
    Number(f64),
    Flag(bool),
    Text(&'static str),
}

/// Extents beyond this are typing errors or attacks, and their products could overflow.
const LARGEST: u64 = 1 << 31;

impl Fields {
    pub(crate) fn read(path: &Path) -> Result<Self, ConvertError> {
        let text = std::fs::read(path).map_err(ConvertError::read(path))?;
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => Ok(Self::new(map)),
            Ok(_) => Err(ConvertError::file(path, "expected a JSON object")),
            Err(e) => Err(ConvertError::file(path, format!("not JSON: {e}"))),
        }
    }

    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Self { map, prefix: String::new(), read: Rc::default() }
    }

    /// The same fields, and these where the file does not have them, not even as `null`.
    pub(crate) fn with_defaults(&self, defaults: &[(&str, Given)]) -> Self {
        let mut out = self.clone();
        for (name, given) in defaults {
            out.map.entry(*name).or_insert_with(|| match *given {
                Given::Count(n) => n.into(),
                Given::Number(x) => x.into(),
                Given::Flag(b) => b.into(),
                Given::Text(s) => s.into(),
            });
        }
        out
    }

    /// Gives a field a value in place of the file's.
    pub(crate) fn set(&mut self, name: &str, value: Value) {
        self.map.insert(name.to_owned(), value);
    }

    /// The same fields, where lists of one number for each layer are that number.
    pub(crate) fn with_uniform(&self, names: &[&str]) -> Result<Self, ConvertError> {
        let mut out = self.clone();
        for name in names {
            let Some(Value::Array(list)) = self.value(name) else { continue };
            match list.first().filter(|first| list.iter().all(|v| v == *first)) {
                Some(one) => out.map.insert((*name).to_owned(), one.clone()),
                None => {
                    return Err(self.wrong(name, "a list of different values", "one value for all layers"));
                }
            };
        }
        Ok(out)
    }

    /// The same fields, where the object in this one lacks these.
    pub(crate) fn without(&self, name: &str, inner: &[&str]) -> Self {
        let mut out = self.clone();
        if let Some(Value::Object(map)) = out.map.get_mut(name) {
            map.retain(|key, _| !inner.contains(&key.as_str()));
        }
        out
    }

    /// The object in this field, whose own fields are then named `field.name` in errors.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Self>, ConvertError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { prefix: format!("{}{name}.", self.prefix), ..Self::new(map.clone()) }))
            }
            Some(v) => Err(self.wrong(name, v, "an object")),
        }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn value(&self, name: &str) -> Option<&Value> {
        let value = self.map.get(name).filter(|v| !v.is_null())?;
        self.read.borrow_mut().insert(name.to_owned());
        Some(value)
    }

    fn is_null(&self, name: &str) -> bool {
        self.map.get(name).is_some_and(Value::is_null)
    }

    /// Fields that have a value and that nobody asked for.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (&str, &Value)> {
        let read = self.read.borrow().clone();
        self.map.iter().map(|(n, v)| (n.as_str(), v)).filter(move |(n, v)| !v.is_null() && !read.contains(*n))
    }

    pub(crate) fn wrong(
        &self,
        name: &str,
        found: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> ConvertError {
        ConvertError::config(format!("{}{name}", self.prefix), found, expected)
    }

    fn absent(&self, name: &str, expected: &str) -> ConvertError {
        self.wrong(name, "absent", expected)
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&str>, ConvertError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.wrong(name, v, "a string")),
        }
    }

    /// `null` is false, as it is where released code asks for the field.
    pub(crate) fn flag(&self, name: &str, default: bool) -> Result<bool, ConvertError> {
        match self.value(name) {
            None => Ok(default && !self.is_null(name)),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.wrong(name, v, "true or false")),
        }
    }

    /// Refuses a text that is there and is none of these.
    pub(crate) fn says(&self, name: &str, accepted: &[&str]) -> Result<(), ConvertError> {
        match self.string(name)? {
            Some(other) if !accepted.contains(&other) => {
                let expected: Vec<String> = accepted.iter().map(|v| format!("{v:?}")).collect();
                Err(self.wrong(name, format!("{other:?}"), expected.join(" or ")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a flag that is there and is the other.
    pub(crate) fn says_flag(&self, name: &str, accepted: bool) -> Result<(), ConvertError> {
        match self.flag(name, accepted)? {
            other if other != accepted => Err(self.wrong(name, other, accepted.to_string())),
            _ => Ok(()),
        }
    }

    /// A positive extent; required.
    pub(crate) fn size(&self, name: &str) -> Result<usize, ConvertError> {
        self.optional_size(name)?.ok_or_else(|| self.absent(name, "a positive integer"))
    }

    /// A positive extent of at most `most`; required.
    pub(crate) fn size_up_to(&self, name: &str, most: usize) -> Result<usize, ConvertError> {
        match self.size(name)? {
            n if n <= most => Ok(n),
            n => Err(self.wrong(name, n, format!("at most {most}"))),
        }
    }

    /// A positive extent, if there is one.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<usize>, ConvertError> {
        match self.value(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=LARGEST).contains(&n) => Ok(Some(n as usize)),
                _ => Err(self.wrong(name, v, "a positive integer")),
            },
        }
    }

    /// An index or a count that may be 0; `null` only where leaving it out means 0 as well.
    pub(crate) fn count(&self, name: &str, default: usize) -> Result<usize, ConvertError> {
        match self.value(name) {
            None if default > 0 && self.is_null(name) => {
                Err(self.wrong(name, "null", "an integer of 0 or more"))
            }
            None => Ok(default),
            Some(v) => match v.as_u64() {
                Some(n) if n <= LARGEST => Ok(n as usize),
                _ => Err(self.wrong(name, v, "an integer of 0 or more")),
            },
        }
    }

    /// A list of indices; empty when absent.
    pub(crate) fn indices(&self, name: &str) -> Result<Vec<usize>, ConvertError> {
        let Some(v) = self.value(name) else { return Ok(Vec::new()) };
        v.as_array()
            .and_then(|a| a.iter().map(|i| i.as_u64().map(|i| i as usize)).collect())
            .ok_or_else(|| self.wrong(name, v, "a list of integers"))
    }

    /// Of which of two kinds each of `layers` layers is: whether of the second. `None` where there is no such list.
    pub(crate) fn layer_kinds(
        &self,
        name: &str,
        layers: usize,
        [first, second]: [&str; 2],
    ) -> Result<Option<Vec<bool>>, ConvertError> {
        let Some(v) = self.value(name) else { return Ok(None) };
        let kinds = v.as_array().ok_or_else(|| self.wrong(name, v, "a list"))?;
        if kinds.len() != layers {
            return Err(self.wrong(name, format!("{} entries", kinds.len()), format!("{layers} entries")));
        }
        let one = |kind: &Value| match kind.as_str() {
            Some(s) if s == first => Ok(false),
            Some(s) if s == second => Ok(true),
            _ => Err(self.wrong(name, kind, format!("{first:?} or {second:?}"))),
        };
        kinds.iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    /// A list of numbers; required.
    pub(crate) fn floats(&self, name: &str) -> Result<Vec<f64>, ConvertError> {
        let Some(v) = self.value(name) else { return Err(self.absent(name, "a list of numbers")) };
        v.as_array()
            .and_then(|a| a.iter().map(Value::as_f64).collect())
            .ok_or_else(|| self.wrong(name, v, "a list of numbers"))
    }

    /// A finite number, if there is one.
    pub(crate) fn float(&self, name: &str) -> Result<Option<f64>, ConvertError> {
        match self.value(name) {
            None => Ok(None),
            Some(v) => v.as_f64().map(Some).ok_or_else(|| self.wrong(name, v, "a number")),
        }
    }

    /// A number above 0, which is `default` where the field is left out. Released code computes with it: `null` is refused.
    pub(crate) fn number(&self, name: &str, default: f64) -> Result<f64, ConvertError> {
        if self.is_null(name) {
            return Err(self.wrong(name, "null", "a number above 0"));
        }
        self.positive_float(name, Some(default))
    }

    /// A number above 0; required without a default, which `null` stands for as well.
    pub(crate) fn positive_float(&self, name: &str, default: Option<f64>) -> Result<f64, ConvertError> {
        match self.float(name)?.or(default) {
            None => Err(self.absent(name, "a number above 0")),
            Some(x) if x > 0.0 => Ok(x),
            Some(x) => Err(self.wrong(name, x, "a number above 0")),
        }
    }
}
