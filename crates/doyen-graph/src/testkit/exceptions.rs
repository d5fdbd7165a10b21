//! The visible list of cases a backend may fail, each with its reason.

use serde::Deserialize;
use std::{fs, io, path::Path};

/// A case, or a pattern of case names, that is not demanded.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// Case name; `*` stands for any run of characters.
    pub case: String,
    /// Backend the exception is for; any when absent.
    pub backend: Option<String>,
    /// Why.
    pub reason: String,
}

/// The exceptions of a project.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exceptions {
    /// In the order of the file.
    pub exceptions: Vec<Exception>,
}

impl Exceptions {
    /// Reads a file `{"exceptions": [{"case": ..., "backend": ..., "reason": ...}]}`.
    ///
    /// # Errors
    /// When the file cannot be read or an entry lacks a case or a reason.
    pub fn read(path: &Path) -> io::Result<Self> {
        let out: Self = serde_json::from_str(&fs::read_to_string(path)?)?;
        match out.exceptions.iter().find(|e| e.reason.trim().is_empty() || e.case.is_empty()) {
            Some(e) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("exception for {:?}: a case and a reason are required", e.case),
            )),
            None => Ok(out),
        }
    }

    /// The first exception that applies to a case on a backend.
    pub fn find(&self, case: &str, backend: &str) -> Option<&Exception> {
        self.exceptions
            .iter()
            .find(|e| e.backend.as_ref().is_none_or(|b| b == backend) && glob(&e.case, case))
    }
}

/// Whether `text` is `pattern` with every `*` replaced by some run of characters.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or("");
    for part in parts {
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        for (pattern, text, yes) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*", "", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(glob(pattern, text), yes, "{pattern} {text}");
        }
    }

    #[test]
    fn the_first_exception_of_the_backend_applies() {
        let list: Exceptions = serde_json::from_str(
            r#"{"exceptions": [{"case": "x-*", "backend": "cpu", "reason": "r1"}, {"case": "x-y", "reason": "r2"}]}"#,
        )
        .unwrap();
        assert_eq!(list.find("x-y", "cpu").unwrap().reason, "r1");
        assert_eq!(list.find("x-y", "reference").unwrap().reason, "r2");
        assert!(list.find("x-z", "reference").is_none());
    }
}
