//! The named special tokens (`bos_token`, `eos_token`, ...) of `tokenizer_config.json` and `special_tokens_map.json`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Special tokens by the name under which configuration files and chat templates know them.
///
/// Names end in `_token`. A token that a file sets to `null` is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedTokens {
    tokens: BTreeMap<String, String>,
    additional: Vec<String>,
}

impl NamedTokens {
    /// Reads the tokens out of a parsed `tokenizer_config.json` or `special_tokens_map.json`.
    ///
    /// Values are strings or objects with `content`; anything else under a `*_token` key (such as the flag
    /// `add_bos_token`) is another kind of setting and left alone.
    pub fn from_config(config: &Map<String, Value>) -> Self {
        let mut named = Self::default();
        for (name, value) in config {
            if name == "extra_special_tokens" {
                named.read_extra(value);
            } else if name == "additional_special_tokens" {
                named.additional.extend(value.as_array().into_iter().flatten().filter_map(content));
            } else if name.ends_with("_token")
                && let Some(token) = content(value)
            {
                named.tokens.insert(name.clone(), token);
            }
        }
        named
    }

    /// Adds the tokens of `other` that are not known here.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        for (name, token) in other.tokens {
            self.tokens.entry(name).or_insert(token);
        }
        if self.additional.is_empty() {
            self.additional = other.additional;
        }
        self
    }

    /// The token called `name`, such as `"pad_token"`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).map(String::as_str)
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<&str> {
        self.get("bos_token")
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<&str> {
        self.get("eos_token")
    }

    /// All named tokens as (name, token), in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tokens.iter().map(|(name, token)| (name.as_str(), token.as_str()))
    }

    /// `additional_special_tokens`: special tokens without a name of their own.
    pub fn additional(&self) -> &[String] {
        &self.additional
    }

    /// Newer files give extra tokens a name each, or list them.
    fn read_extra(&mut self, value: &Value) {
        match value {
            Value::Object(extra) => {
                for (name, value) in extra {
                    if let Some(token) = content(value) {
                        self.tokens.insert(name.clone(), token);
                    }
                }
            }
            Value::Array(extra) => self.additional.extend(extra.iter().filter_map(content)),
            _ => {}
        }
    }
}

fn content(value: &Value) -> Option<String> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
    Some(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(json: &str) -> NamedTokens {
        NamedTokens::from_config(serde_json::from_str::<Value>(json).unwrap().as_object().unwrap())
    }

    #[test]
    fn strings_objects_nulls_and_flags() {
        let tokens = named(
            r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
                "add_bos_token": true, "model_max_length": 5, "additional_special_tokens": ["<a>", {"content": "<b>"}],
                "extra_special_tokens": {"image_token": "<img>"}}"#,
        );
        assert_eq!(tokens.bos(), Some("<s>"));
        assert_eq!(tokens.eos(), Some("</s>"));
        assert_eq!(tokens.get("pad_token"), None);
        assert_eq!(tokens.get("add_bos_token"), None);
        assert_eq!(tokens.get("image_token"), Some("<img>"));
        assert_eq!(tokens.additional(), ["<a>", "<b>"]);
        assert_eq!(tokens.iter().count(), 3);
    }

    #[test]
    fn the_first_file_wins() {
        let tokens =
            named(r#"{"bos_token": "<s>"}"#).or(named(r#"{"bos_token": "<x>", "eos_token": "<y>"}"#));
        assert_eq!((tokens.bos(), tokens.eos()), (Some("<s>"), Some("<y>")));
    }
}
