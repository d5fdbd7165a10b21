//! Which of a package's chat templates is the one to use.

use serde_json::Value;

use super::{ChatTemplate, TemplateError};

const CONFIG: &str = "tokenizer_config.json";
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The chat templates a package offers, by name.
///
/// Most packages have one, called `default`; some add `tool_use` or `rag`.
#[derive(Debug, Clone)]
pub struct ChatTemplates {
    templates: Vec<(String, ChatTemplate)>,
}

impl ChatTemplates {
    /// Finds the templates in the files of a package: the text of `chat_template.jinja`, if there is one, is the
    /// default template; otherwise `chat_template` of `tokenizer_config.json` counts, which is a text, a list of
    /// `{"name": ..., "template": ...}`, or an object from names to texts. `None` when there is no template.
    ///
    /// # Errors
    /// [`TemplateError::Config`] when the configuration is not what it should be, and as [`ChatTemplate::new`].
    pub fn find(
        jinja: Option<&[u8]>,
        tokenizer_config: Option<&[u8]>,
    ) -> Result<Option<Self>, TemplateError> {
        if let Some(bytes) = jinja {
            let template = ChatTemplate::from_bytes(bytes, "chat_template.jinja")?;
            return Ok(Some(Self { templates: vec![(DEFAULT.to_owned(), template)] }));
        }
        let Some(bytes) = tokenizer_config else {
            return Ok(None);
        };
        let config: Value = serde_json::from_slice(bytes)
            .map_err(|e| TemplateError::Config { file: CONFIG, reason: format!("not valid JSON: {e}") })?;
        let named: Vec<(&str, &str)> = match config.get("chat_template") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => vec![(DEFAULT, text)],
            Some(Value::Object(map)) => {
                let texts = map.iter().map(|(name, text)| Some((name.as_str(), text.as_str()?)));
                texts.collect::<Option<_>>().ok_or_else(wrong_shape)?
            }
            Some(Value::Array(list)) => {
                let texts =
                    list.iter().map(|entry| Some((entry["name"].as_str()?, entry["template"].as_str()?)));
                texts.collect::<Option<_>>().ok_or_else(wrong_shape)?
            }
            Some(_) => return Err(wrong_shape()),
        };
        if named.is_empty() {
            return Ok(None);
        }
        let compiled = named.into_iter().map(|(name, text)| {
            let file =
                if name == DEFAULT { CONFIG.to_owned() } else { format!("{CONFIG}, template {name:?}") };
            Ok((name.to_owned(), ChatTemplate::new(text, &file)?))
        });
        Ok(Some(Self { templates: compiled.collect::<Result<_, _>>()? }))
    }

    /// The names, in the order of the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.iter().map(|(name, _)| name.as_str())
    }

    /// The template called `name`.
    ///
    /// # Errors
    /// [`TemplateError::UnknownName`] with the names there are.
    pub fn get(&self, name: &str) -> Result<&ChatTemplate, TemplateError> {
        self.find_named(name).ok_or_else(|| self.unknown(name))
    }

    /// The template that `transformers` picks: `tool_use` if there are tools and such a template, else `default`.
    /// A single template is taken whatever its name.
    ///
    /// # Errors
    /// [`TemplateError::UnknownName`] when there are several and none of them is the default.
    pub fn pick(&self, with_tools: bool) -> Result<&ChatTemplate, TemplateError> {
        if let [(_, only)] = &self.templates[..] {
            return Ok(only);
        }
        let tool_use = if with_tools { self.find_named(TOOL_USE) } else { None };
        tool_use.or_else(|| self.find_named(DEFAULT)).ok_or_else(|| self.unknown(DEFAULT))
    }

    fn find_named(&self, name: &str) -> Option<&ChatTemplate> {
        self.templates.iter().find(|(known, _)| known == name).map(|(_, template)| template)
    }

    fn unknown(&self, name: &str) -> TemplateError {
        TemplateError::UnknownName {
            wanted: name.to_owned(),
            known: self.names().collect::<Vec<_>>().join(", "),
        }
    }
}

fn wrong_shape() -> TemplateError {
    TemplateError::Config {
        file: CONFIG,
        reason: "\"chat_template\" is neither a text nor a list of named templates".to_owned(),
    }
}
