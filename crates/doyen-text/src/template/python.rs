//! Python methods that `minijinja-contrib` lacks or reads differently.
//!
//! Templates are written against Python values. [`unknown_method`] is asked for every method of a value; it
//! answers these and leaves the rest (`strip`, `split`, `items`, `get`, ...) to the contrib crate.

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Widest indentation by a number.
const MAX_INDENT: usize = 256;

pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => match value.as_str() {
            Some(text) => string_method(state, text, method, args)?,
            None => None,
        },
        ValueKind::Seq => sequence_method(value, method, args)?,
        ValueKind::Map if method == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string_method(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.split_once(separator) {
                Some((before, after)) => triple(before, separator, after),
                None => triple(text, "", ""),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => triple(before, separator, after),
                None => triple("", "", text),
            }
        }
        "rsplit" => {
            let (separator, max, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.or(kwargs.get("sep")?);
            let max = max.or(kwargs.get("maxsplit")?);
            kwargs.assert_all_used()?;
            rsplit(text, separator, max)?
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let at = if method == "index" { text.find(part) } else { text.rfind(part) };
            let at = at.ok_or_else(|| invalid("substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "splitlines" => {
            let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
            kwargs.assert_all_used()?;
            split_lines(text, keep).into_iter().map(Value::from).collect()
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit()))
        }
        "ljust" | "rjust" | "center" | "zfill" => padded(state, text, method, args)?,
        // The contrib crate makes the padding before it is charged for, gigabytes of it if the template says so.
        "format" if has_wide_field(text) => return Err(invalid("format: widths have at most 4 digits")),
        _ => return Ok(None),
    }))
}

fn invalid(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn triple(before: &str, separator: &str, after: &str) -> Value {
    Value::from(Tuple::from([before, separator, after].map(Value::from)))
}

fn rsplit(text: &str, separator: Option<&str>, max: Option<i64>) -> Result<Value, Error> {
    let max = max.and_then(|m| usize::try_from(m).ok()).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(invalid("empty separator")),
        Some(separator) => text.rsplitn(max + 1, separator).collect(),
        None => {
            let mut parts = Vec::new();
            let mut rest = text.trim_end();
            while !rest.is_empty() && parts.len() < max {
                let start = rest
                    .rfind(char::is_whitespace)
                    .map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Python ends lines at more characters than `\n`, and takes `\r\n` as one.
fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(ends) else {
            lines.push(rest);
            break;
        };
        let end = if rest[at..].starts_with("\r\n") {
            at + 2
        } else {
            at + rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    lines
}

/// Every letter after something that is no letter becomes upper case (also in "it's").
fn title(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

fn padded(state: &State<'_, '_>, text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = match (method, fill) {
        ("zfill", None) => "0",
        (_, None) => " ",
        ("zfill", Some(_)) => return Err(invalid("zfill takes one argument")),
        (_, Some(fill)) if fill.chars().count() == 1 => fill,
        _ => return Err(invalid("the fill character must be exactly one character long")),
    };
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    state.consume_fuel((missing / 16) as u64)?;
    let pad = |n: usize| fill.repeat(n);
    Ok(Value::from(match method {
        "ljust" => format!("{text}{}", pad(missing)),
        "center" => {
            // Python puts the odd one on the left when both width and the padding are odd.
            let left = missing / 2 + usize::from(missing % 2 == 1 && width % 2 == 1);
            format!("{}{text}{}", pad(left), pad(missing - left))
        }
        "zfill" => match text.strip_prefix(['+', '-']) {
            Some(digits) => format!("{}{}{digits}", &text[..1], pad(missing)),
            None => format!("{}{text}", pad(missing)),
        },
        _ => format!("{}{text}", pad(missing)),
    }))
}

/// Whether a format text holds a number of more than four digits or takes a width from an argument.
fn has_wide_field(text: &str) -> bool {
    let long_number = text.as_bytes().split(|b| !b.is_ascii_digit()).any(|digits| digits.len() > 4);
    let nested = text.split('{').skip(1).any(|field| field.contains(':') && !field.contains('}'));
    long_number || nested
}

fn sequence_method(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match method {
        "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            Some(Value::from(at.ok_or_else(|| invalid("the value is not in the list"))?))
        }
        "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    })
}

/// `indent` of Jinja, whose width may be a text as well as a number of spaces.
#[allow(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]
pub(super) fn indent(
    state: &State<'_, '_>,
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let width = width.or(kwargs.get("width")?);
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = kwargs.get::<Option<bool>>("blank")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let indention = match &width {
        None => "    ".to_owned(),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(spaces)) if spaces <= MAX_INDENT => " ".repeat(spaces),
            _ => return Err(invalid("indent: the width must be a text or a small number")),
        },
    };
    state.consume_fuel((text.matches('\n').count().saturating_mul(indention.len()) / 64) as u64)?;
    let mut out = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `wordcount` of Jinja.
pub(super) fn word_count(text: &str) -> usize {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
}

/// `is iterable` of Jinja: None is not, an undefined value is.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `is callable` of Jinja: functions and macros.
pub(super) fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

/// `is sequence` of Jinja: whatever has a length and can be indexed, strings and mappings included.
pub(super) fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}
