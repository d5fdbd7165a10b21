//! The `tojson` filter as `transformers` overrides it: Python's `json.dumps` with `ensure_ascii=False`.
//!
//! Jinja's own filter escapes HTML, which would put `\u003c` where a model expects `<`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deeper values come only from templates that build them to overflow a stack.
const MAX_DEPTH: usize = 200;
const MAX_INDENT: usize = 64;
/// One unit of fuel pays for this many bytes; `minijinja` charges 16 times as much for serialized bytes as for
/// copied ones (64 bytes), and so does this filter.
const BYTES_PER_FUEL: usize = 4;

/// `value|tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`; the last two by name only.
#[allow(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let indent = indent_of(indent.or(kwargs.get("indent")?))?;
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none());
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let (item, key) = match separators {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => separators_of(&pair)?,
    };
    let mut writer =
        Writer { state, out: String::new(), charged: 0, ensure_ascii, sort_keys, indent, item, key };
    writer.value(value, 0)?;
    writer.charge()?;
    Ok(Value::from(writer.out))
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// What one level is indented by; Python takes a number of spaces or a text.
fn indent_of(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|v| !v.is_none() && !v.is_undefined()) else {
        return Ok(None);
    };
    let text = match (indent.as_str(), indent.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(spaces)) => " ".repeat(usize::try_from(spaces).unwrap_or(0).min(MAX_INDENT + 1)),
        (None, None) => return Err(invalid("tojson: indent must be a number or a string")),
    };
    if text.len() > MAX_INDENT {
        return Err(invalid(format!("tojson: indent is longer than {MAX_INDENT}")));
    }
    Ok(Some(text))
}

fn separators_of(pair: &Value) -> Result<(String, String), Error> {
    let mut parts = pair.try_iter()?.map(|part| part.as_str().map(str::to_owned));
    match (parts.next().flatten(), parts.next().flatten(), parts.next()) {
        (Some(item), Some(key), None) => Ok((item, key)),
        _ => Err(invalid("tojson: separators must be two strings")),
    }
}

struct Writer<'a, 't, 'e> {
    state: &'a State<'t, 'e>,
    out: String,
    /// Bytes of `out` that were paid for.
    charged: usize,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Writer<'_, '_, '_> {
    fn charge(&mut self) -> Result<(), Error> {
        let new = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.state.consume_fuel((new / BYTES_PER_FUEL) as u64)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: the value is nested more than {MAX_DEPTH} levels deep")));
        }
        self.charge()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    let name = key_text(&key)?;
                    pairs.push((name, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.list('{', '}', depth, pairs, |writer, (name, value)| {
                    writer.string(&name);
                    writer.out.push_str(&writer.key.clone());
                    writer.value(&value, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', depth, items, |writer, value| writer.value(&value, depth + 1))?;
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: Vec<T>,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let empty = items.is_empty();
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
        } else {
            self.out.push_str(&float_text(f64::try_from(value.clone())?));
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Keys are strings in JSON; Python writes numbers, booleans and None as their JSON text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float_text(f64::try_from(key.clone())?)),
        kind => Err(invalid(format!("tojson: a key of type {kind} is not JSON serializable"))),
    }
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::float_text;

    /// Expected texts by Python's `json.dumps`.
    #[test]
    fn floats_as_python_writes_them() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.234567890123456e22, "1.234567890123456e+22"),
            (-2.5e100, "-2.5e+100"),
            (123456.789, "123456.789"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float_text(value), expected);
        }
    }
}
