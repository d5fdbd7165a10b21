//! A YAML document as the values that JSON has, for manifests in YAML. Bounded: an alias stands for a copy of what it
//! names, and what all copies together may be is limited, as are depth and file size. Called by `manifest`.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};
use std::collections::HashMap;

/// Far above any manifest, whose graph inputs and outputs take a few hundred bytes a layer.
const LARGEST_FILE: usize = 8 << 20;
const MOST_VALUES: usize = 1 << 19;
/// Bytes of a text that count as one more value.
const TEXT: usize = 16;
const DEEPEST: usize = 64;

/// Reads the first document of a file.
///
/// # Errors
/// When it is no YAML, larger or deeper than any manifest, or has keys that are no texts: says where and what.
pub(super) fn read(bytes: &[u8]) -> Result<Value, String> {
    if bytes.len() > LARGEST_FILE {
        return Err(format!("expected at most {LARGEST_FILE} bytes, found {}", bytes.len()));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| format!("not UTF-8 text: {e}"))?;
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| e.to_string())?;
        if event == Event::DocumentEnd {
            break;
        }
        builder.take(event).map_err(|what| format!("line {}: {what}", span.start.line()))?;
    }
    Ok(builder.root.unwrap_or(Value::Null))
}

/// A list or an object that is not finished.
enum Open {
    List(Vec<Value>),
    Object(Map<String, Value>, Option<String>),
}

#[derive(Default)]
struct Builder {
    root: Option<Value>,
    /// With the anchor that names it, 0 for none.
    open: Vec<(Open, usize)>,
    /// What anchors name, with how much it counts and how deep it is.
    anchors: HashMap<usize, (Value, usize, usize)>,
    values: usize,
}

impl Builder {
    fn take(&mut self, event: Event<'_>) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.count(1 + text.len() / TEXT)?;
                let plain = style == ScalarStyle::Plain && tag.is_none();
                let value = if plain { scalar(&text) } else { Value::String(text.into_owned()) };
                self.put(value, anchor)
            }
            Event::SequenceStart(anchor, _) => self.begin(Open::List(Vec::new()), anchor),
            Event::MappingStart(anchor, _) => self.begin(Open::Object(Map::new(), None), anchor),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some((Open::List(list), anchor)) => self.put(list.into(), anchor),
                Some((Open::Object(object, _), anchor)) => self.put(object.into(), anchor),
                None => Err("an end without a beginning".into()),
            },
            Event::Alias(anchor) => {
                let found = self.anchors.get(&anchor);
                let (value, values, depth) = found.ok_or("an alias inside of what it names")?.clone();
                self.count(values)?;
                self.deep(depth)?;
                self.put(value, 0)
            }
            _ => Ok(()),
        }
    }

    fn count(&mut self, values: usize) -> Result<(), String> {
        self.values = self.values.saturating_add(values);
        if self.values > MOST_VALUES {
            return Err(format!("more than {MOST_VALUES} values, those that aliases stand for included"));
        }
        Ok(())
    }

    fn begin(&mut self, open: Open, anchor: usize) -> Result<(), String> {
        self.count(1)?;
        self.deep(1)?;
        self.open.push((open, anchor));
        Ok(())
    }

    /// Whether a value of `depth` can stand here.
    fn deep(&self, depth: usize) -> Result<(), String> {
        if self.open.len() + depth > DEEPEST {
            return Err(format!(
                "values nested more than {DEEPEST} deep, those that aliases stand for included"
            ));
        }
        Ok(())
    }

    fn put(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        if anchor != 0 {
            // A copy, counted as one: anchors without aliases must not double what a file may hold unseen.
            let values = values(&value);
            self.count(values)?;
            self.anchors.insert(anchor, (value.clone(), values, depth(&value)));
        }
        match self.open.last_mut() {
            None => self.root = Some(value),
            Some((Open::List(list), _)) => list.push(value),
            Some((Open::Object(object, key), _)) => match (key.take(), value) {
                (Some(key), value) => {
                    if object.insert(key.clone(), value).is_some() {
                        return Err(format!("key {key:?} is there twice"));
                    }
                }
                (None, Value::String(text)) => *key = Some(text),
                (None, other @ (Value::Null | Value::Bool(_) | Value::Number(_))) => {
                    *key = Some(other.to_string());
                }
                (None, _) => return Err("expected a text as a key, found a list or an object".into()),
            },
        }
        Ok(())
    }
}

/// Values in a value, itself included, long texts counting for several.
fn values(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(values).sum(),
        Value::Object(object) => object.iter().map(|(k, v)| 1 + k.len() / TEXT + values(v)).sum(),
        Value::String(text) => text.len() / TEXT,
        _ => 0,
    }
}

/// Lists and objects inside of each other.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        Value::Object(object) => 1 + object.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// A plain scalar by YAML's core schema.
fn scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ => {
            let digits =
                text.trim_start_matches(['+', '-']).starts_with(|c: char| c.is_ascii_digit() || c == '.');
            let number = || {
                let integer =
                    text.parse::<i64>().map(Number::from).or_else(|_| text.parse::<u64>().map(Number::from));
                integer.ok().or_else(|| Number::from_f64(text.parse().ok()?))
            };
            digits.then(number).flatten().map_or_else(|| text.into(), Value::Number)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fmt::Write;

    #[test]
    fn values_are_those_of_json() {
        let text =
            "a: 1\nb: [x, '2', -3, 1.5, true, ~]\nc:\n- d: e\n  f: &s [1, 2]\n- *s\n5: .inf\nv: 1.2.3\n";
        let expected = json!({
            "a": 1, "b": ["x", "2", -3, 1.5, true, null], "c": [{"d": "e", "f": [1, 2]}, [1, 2]],
            "5": ".inf", "v": "1.2.3",
        });
        assert_eq!(read(text.as_bytes()).unwrap(), expected);
        assert_eq!(read(b"").unwrap(), Value::Null);
        assert_eq!(read(b"{\"json\": [1, {}]}").unwrap(), json!({"json": [1, {}]}));
    }

    #[test]
    fn hostile_files_are_refused() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..20 {
            let before = vec![format!("*a{}", i - 1); 10].join(", ");
            writeln!(bomb, "a{i}: &a{i} [{before}]").unwrap();
        }
        let e = read(bomb.as_bytes()).unwrap_err();
        assert!(e.contains("more than") && e.starts_with("line "), "{e}");
        let mut deep = "- &a0 [x]\n".to_owned();
        for i in 1..85 {
            let (left, right) = ("[".repeat(60), "]".repeat(60));
            writeln!(deep, "- &a{i} {left}*a{}{right}", i - 1).unwrap();
        }
        let e = read(deep.as_bytes()).unwrap_err();
        assert!(e.contains("deep") && e.starts_with("line "), "{e}");
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), vec!["*a"; 1000].join(","));
        let e = read(long.as_bytes()).unwrap_err();
        assert!(e.contains("more than"), "{e}");
        let e = read("[".repeat(100_000).as_bytes()).unwrap_err();
        assert!(e.contains("deep") || e.contains("recursion") || e.contains("limit"), "{e}");
        let e = read(&vec![b'#'; LARGEST_FILE + 1]).unwrap_err();
        assert!(e.contains("at most"), "{e}");
        let e = read("- x\n".repeat(MOST_VALUES).as_bytes()).unwrap_err();
        assert!(e.contains("more than"), "{e}");
        for (text, word) in
            [("a: 1\na: 2\n", "twice"), ("[1]: 2\n", "key"), ("a: *b\n", "b"), ("&a [*a]", "alias")]
        {
            let e = read(text.as_bytes()).unwrap_err();
            assert!(e.contains(word), "{text}: {e}");
        }
        assert!(read(b"\xff\xfe").unwrap_err().contains("UTF-8"));
    }
}
