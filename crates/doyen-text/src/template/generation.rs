//! `{% generation %}` blocks.
//!
//! `transformers` extends Jinja with this block to mark what an assistant wrote, for training masks. When a
//! prompt is rendered the block is only its body in a scope of its own, so it becomes a `{% with %}` block before
//! the template is compiled. Lines stay where they are, so positions in errors stay right.

use std::borrow::Cow;

/// Rewrites the generation blocks of a template; everything else is left as it is.
pub(super) fn rewrite(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut raw = false;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match rest.as_bytes().get(1) {
            Some(b'%') => {
                let tag = Tag::read(rest);
                match tag.name {
                    "generation" if !raw => tag.push_renamed("with", &mut out),
                    "endgeneration" if !raw => tag.push_renamed("endwith", &mut out),
                    name => {
                        raw = (raw && name != "endraw") || name == "raw";
                        // Inside of raw text a tag is not a tag and may be cut short by the real end of the block.
                        let whole = if raw && name != "raw" { "{%" } else { tag.whole };
                        out.push_str(whole);
                        rest = &rest[whole.len()..];
                        continue;
                    }
                }
                tag.whole.len()
            }
            Some(b'{') if !raw => copy(&rest[..2 + end_of_expression(&rest[2..], "}}")], &mut out),
            Some(b'#') if !raw => copy(&rest[..rest.find("#}").map_or(rest.len(), |end| end + 2)], &mut out),
            _ => copy("{", &mut out),
        };
        rest = &rest[taken..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

fn copy(text: &str, out: &mut String) -> usize {
    out.push_str(text);
    text.len()
}

/// A `{% ... %}` at the beginning of a text.
struct Tag<'a> {
    whole: &'a str,
    /// The first word, at `name_at` in `whole`.
    name: &'a str,
    name_at: usize,
}

impl<'a> Tag<'a> {
    fn read(text: &'a str) -> Self {
        let whole = &text[..2 + end_of_expression(&text[2..], "%}")];
        let inner = whole[2..].trim_start_matches(['-', '+']).trim_start();
        let name_at = whole.len() - inner.len();
        let length = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
        Self { whole, name: &inner[..length], name_at }
    }

    fn push_renamed(&self, name: &str, out: &mut String) {
        out.push_str(&self.whole[..self.name_at]);
        out.push_str(name);
        out.push_str(&self.whole[self.name_at + self.name.len()..]);
    }
}

/// Length of the expression at the beginning of `text` including its closing mark; string literals are skipped.
fn end_of_expression(text: &str, close: &str) -> usize {
    let bytes = text.as_bytes();
    let mut quote = None;
    let mut at = 0;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(q), byte) if q == byte => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => {}
        }
        at += 1;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_are_renamed_and_their_whitespace_control_kept() {
        assert_eq!(
            rewrite("a{% generation %}b{%- endgeneration -%}\n{%+generation%}c{% endgeneration %}"),
            "a{% with %}b{%- endwith -%}\n{%+with%}c{% endwith %}"
        );
    }

    #[test]
    fn other_text_is_left_alone() {
        for source in [
            "{{ '{% generation %}' }} {% set x = \"{% generation %}\" %}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% raw %}{{ ' {% endraw %}{{ '{% generation %}' }}",
            "{% if generation %}{{ generation }}{% endif %}",
            "{% generations %} {{ generation",
            "{{ 'it\\'s {% generation %}' }}",
            "{% generation_x %}{",
        ] {
            assert_eq!(rewrite(source), source);
        }
        assert_eq!(
            rewrite("{% raw %}{% x 'y {% endraw %}{% generation %}"),
            "{% raw %}{% x 'y {% endraw %}{% with %}"
        );
    }

    proptest! {
        #[test]
        fn nothing_is_lost(source in "([{%#}'\" é\\\\-]|generation|raw|endraw|endgeneration|x){0,30}") {
            let back = rewrite(&source).replace("endwith", "endgeneration").replace("with", "generation");
            prop_assert_eq!(back, source);
        }
    }
}
