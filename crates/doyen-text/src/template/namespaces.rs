//! Keeps namespaces from holding themselves.
//!
//! `{% set ns.x = ns %}` makes a value of infinite depth; printing, comparing or dropping one recurses until the stack is
//! gone, which ends the process. Templates use a namespace as `ns.name` only, so one that is used as a value (stored,
//! passed, printed), or made anywhere but in `{% set ns = namespace(...) %}`, is refused when the template is compiled.

/// What is wrong, with its line (from 1): the first use of a namespace as a value.
pub(super) fn misused(source: &str) -> Option<(usize, String)> {
    let tags: Vec<(usize, Vec<&str>)> =
        tags(source).into_iter().map(|(at, text)| (at, tokens(text))).collect();
    let line = |at: usize| 1 + source[..at].matches('\n').count();
    let mut names = Vec::new();
    for (at, tokens) in &tags {
        match tokens.as_slice() {
            ["set", name, "=", "namespace", "(", rest @ ..] => {
                names.push(*name);
                if rest.contains(&"namespace") {
                    return Some((line(*at), "a namespace inside a namespace".into()));
                }
            }
            other if other.windows(2).any(|w| w == ["namespace", "("]) => {
                let reason = "namespace(...) is used other than as {% set NAME = namespace(...) %}";
                return Some((line(*at), reason.into()));
            }
            _ => {}
        }
    }
    for (at, tokens) in &tags {
        for (i, token) in tokens.iter().enumerate() {
            let before = i.checked_sub(1).map(|b| tokens[b]);
            let after = tokens.get(i + 1).copied();
            let bound = after == Some("=") || before == Some(".");
            if names.contains(token) && !bound && !matches!(after, Some("." | "[")) {
                return Some((
                    line(*at),
                    format!("the namespace {token} is used as a value, not as {token}.name"),
                ));
            }
        }
    }
    None
}

/// Offset and inside of every `{{ }}` and `{% %}`; comments are passed over.
fn tags(source: &str) -> Vec<(usize, &str)> {
    let mut out = Vec::new();
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let open = at + found;
        let close = match source.as_bytes().get(open + 1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => {
                at = source[open..].find("#}").map_or(source.len(), |end| open + end + 2);
                continue;
            }
            _ => {
                at = open + 1;
                continue;
            }
        };
        let inside = open + 2;
        let end = inside + end_of(&source[inside..], close);
        out.push((open, &source[inside..end]));
        at = end;
    }
    out
}

/// Where `close` stands outside of quotes, or the end.
fn end_of(text: &str, close: &str) -> usize {
    let mut i = 0;
    while i < text.len() {
        match text.as_bytes()[i] {
            quote @ (b'"' | b'\'') => i = end_of_string(text, i, quote),
            _ if text.as_bytes()[i..].starts_with(close.as_bytes()) => return i,
            _ => i += 1,
        }
    }
    text.len()
}

/// Behind the string that opens at `i`.
fn end_of_string(text: &str, i: usize, quote: u8) -> usize {
    let bytes = text.as_bytes();
    let mut j = i + 1;
    while j < bytes.len() && bytes[j] != quote {
        j += if bytes[j] == b'\\' { 2 } else { 1 };
    }
    (j + 1).min(text.len())
}

/// Names and single other characters; strings and blanks are left out, `==` is one token.
fn tokens(text: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut i = 0;
    while let Some(c) = text.get(i..).and_then(|t| t.chars().next()) {
        let start = i;
        i += c.len_utf8();
        match c {
            '"' | '\'' => i = end_of_string(text, start, c as u8),
            c if c.is_alphanumeric() || c == '_' => {
                i += text[i..].find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len() - i);
                out.push(&text[start..i]);
            }
            '=' if text[i..].starts_with('=') => {
                i += 1;
                out.push("==");
            }
            c if c.is_whitespace() => {}
            '-' | '+' if start == 0 => {}
            _ => out.push(&text[start..i]),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::misused;

    #[test]
    fn ordinary_namespaces_are_left_alone() {
        for source in [
            "{%- set ns = namespace(last=messages|length - 1, seen=false) -%}ns {% set ns.last = index %}{{ ns.last }}",
            "{% if ns.x == 1 and not ns.y %}{% set ns.t = ns.t ~ 'ns' %}{% endif %}",
            "{# {{ ns }} #}{{ message.ns }}{{ f(ns=1) }}",
        ] {
            let source = format!("{{% set ns = namespace() %}}{source}");
            assert_eq!(misused(&source), None, "{source}");
        }
        assert_eq!(misused("{{ ns }}{{ '{% set a = namespace() %}"), None);
    }

    #[test]
    fn namespaces_as_values_are_named() {
        for (source, word) in [
            ("{% set ns = namespace() %}\n{% set ns.x = ns %}{{ ns.x }}", "ns"),
            ("{% set a = namespace() %}{% set b = a %}{% set a.x = b %}", "a"),
            ("{% set a = namespace() %}{% set a.x = [a] %}", "a"),
            ("{% set a = namespace() %}{{ f(a) }}", "a"),
            ("{% set x = [namespace()] %}{% set y = x[0] %}{% set y.z = x %}", "namespace"),
            ("{% set a = namespace(b=namespace()) %}", "namespace"),
            ("{%- set ns=namespace() -%}{% if ns == ns.x %}{% endif %}", "ns"),
        ] {
            let (line, reason) = misused(source).unwrap_or_else(|| panic!("{source}"));
            assert!(line >= 1 && reason.contains(word), "{source}: {reason}");
        }
    }
}
