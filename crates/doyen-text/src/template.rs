//! Chat templates: Jinja as `transformers` evaluates it.
//!
//! A [`ChatTemplate`] turns messages into the text a model was trained on. The Jinja engine is `minijinja`; here
//! it gets Python's methods, the `tojson` of `transformers`, `raise_exception`, `strftime_now` and generation
//! blocks, and limits on steps and memory, since templates come with models and models from strangers.
//! `docs/chat-templates.md` lists what is supported and what differs.
//!
//! Which template a package means is decided by [`ChatTemplates`]. Parsing what a model answers is not done here.

mod clock;
mod deep;
mod error;
mod generation;
mod namespaces;
mod python;
mod select;
mod tojson;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Map;
use serde_json::Value as Json;

pub use self::clock::Now;
use self::error::Raised;
pub use self::error::TemplateError;
pub use self::select::ChatTemplates;
use crate::tokenizer::NamedTokens;

/// Largest template; the largest released ones have some tens of kilobytes.
const MAX_SOURCE: usize = 1 << 20;
/// Steps a rendering may take whatever its input. A step is an instruction or 64 bytes of data, so this bounds
/// what a template can make to 64 MiB; released templates need some thousands.
const FUEL: u64 = 1 << 20;
/// Bytes of messages, tools and documents for one step more: enough for every byte to be copied eight times.
const BYTES_PER_FUEL: u64 = 8;

/// What a template is given.
#[derive(Debug, Clone)]
pub struct ChatInput<'a> {
    /// The conversation: objects with `role`, `content` and whatever else the template knows.
    pub messages: &'a [Json],
    /// Tools in the JSON schema form of function calling.
    pub tools: Option<&'a [Json]>,
    /// Documents for retrieval: objects with `title` and `text`.
    pub documents: Option<&'a [Json]>,
    /// Whether to end with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Special tokens under their names (`bos_token`, `eos_token`, ...).
    pub tokens: &'a NamedTokens,
    /// Further variables such as `enable_thinking`; they take precedence over everything else.
    pub extra: &'a Map<String, Json>,
    /// The time `strftime_now` tells.
    pub now: Now,
}

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    file: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles `source`; `file` says in errors where it came from.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with line and reason; [`TemplateError::TooLong`] above 1 MiB.
    pub fn new(source: &str, file: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE {
            return Err(TemplateError::TooLong {
                file: file.to_owned(),
                bytes: source.len(),
                limit: MAX_SOURCE,
            });
        }
        if let Some((line, reason)) = namespaces::misused(source) {
            return Err(TemplateError::Syntax { file: file.to_owned(), line, reason });
        }
        deep::with_stack(source.len() as u64, || {
            let mut environment = environment();
            environment
                .add_template_owned(NAME, generation::rewrite(source).into_owned())
                .map_err(|e| TemplateError::syntax(&e, file))?;
            Ok(Self { environment, file: file.to_owned() })
        })
        .map_err(|e| TemplateError::engine(&e, file))?
    }

    /// Compiles a template from the bytes of a file.
    ///
    /// # Errors
    /// [`TemplateError::NotUtf8`], or as [`new`](Self::new).
    pub fn from_bytes(source: &[u8], file: &str) -> Result<Self, TemplateError> {
        let text = std::str::from_utf8(source)
            .map_err(|e| TemplateError::NotUtf8 { file: file.to_owned(), at: e.valid_up_to() })?;
        Self::new(text, file)
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] when the template refuses the messages, [`TemplateError::Endless`] when it
    /// exceeds its limits, [`TemplateError::Render`] with line and reason for anything else.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let list = |items: Option<&[Json]>, size: &mut u64| match items {
            Some(items) => items.iter().map(|item| to_value(item, size)).collect(),
            None => Value::from(()),
        };
        let mut size = 0;
        let mut variables = vec![
            ("messages", list(Some(input.messages), &mut size)),
            ("tools", list(input.tools, &mut size)),
            ("documents", list(input.documents, &mut size)),
            ("add_generation_prompt", Value::from(input.add_generation_prompt)),
        ];
        if !input.tokens.additional().is_empty() {
            let additional = input.tokens.additional().iter().map(String::as_str).collect();
            variables.push(("additional_special_tokens", additional));
        }
        variables.extend(input.tokens.iter().map(|(name, token)| (name, Value::from(token))));
        variables.extend(input.extra.iter().map(|(name, value)| (name.as_str(), to_value(value, &mut size))));
        self.render_with(variables, size, input.now)
    }

    /// `size`: bytes of the variables, which the limits grow with.
    fn render_with(
        &self,
        variables: Vec<(&str, Value)>,
        size: u64,
        now: Now,
    ) -> Result<String, TemplateError> {
        let fuel = FUEL + size / BYTES_PER_FUEL;
        let variables = Value::from_pairs(variables);
        deep::with_stack(fuel, move || {
            let mut environment = self.environment.clone();
            environment.set_fuel(Some(fuel));
            environment.add_function("strftime_now", move |format: &str| now.strftime(format));
            let template =
                environment.get_template(NAME).map_err(|e| TemplateError::syntax(&e, &self.file))?;
            template.render(variables).map_err(|e| TemplateError::render(&e, &self.file, fuel))
        })
        .map_err(|e| TemplateError::engine(&e, &self.file))?
    }
}

/// Compiles and renders in one go, with all variables (`messages`, `tools`, `bos_token`, ...) in one JSON object.
///
/// # Errors
/// As [`ChatTemplate::from_bytes`] and [`ChatTemplate::render`]; [`TemplateError::Config`] when `variables` is not
/// a JSON object.
pub fn render(template: &[u8], variables: &[u8], now: Now) -> Result<String, TemplateError> {
    let malformed = |reason: String| TemplateError::Config { file: "template variables", reason };
    let variables: Json = serde_json::from_slice(variables).map_err(|e| malformed(e.to_string()))?;
    let variables = variables.as_object().ok_or_else(|| malformed("not a JSON object".to_owned()))?;
    let mut size = 0;
    let values = variables.iter().map(|(name, value)| (name.as_str(), to_value(value, &mut size))).collect();
    ChatTemplate::from_bytes(template, "template")?.render_with(values, size, now)
}

/// The Jinja environment of `transformers`.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    if let Ok(syntax) = syntax.build() {
        environment.set_syntax(syntax);
    }
    minijinja_contrib::add_to_environment(&mut environment);
    // Not known to `transformers`, or without limits: the dump of all variables and the indented form of a value.
    environment.remove_global("debug");
    environment.remove_filter("pprint");
    environment.set_unknown_method_callback(python::unknown_method);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_filter("indent", python::indent);
    environment.add_filter("wordcount", python::word_count);
    environment.add_test("callable", python::is_callable);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("sequence", python::is_sequence);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment
}

/// JSON to a template value; adds the bytes it stands for to `size`.
fn to_value(json: &Json, size: &mut u64) -> Value {
    *size += 8;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(value), _, _) => Value::from(value),
            (None, Some(value), _) => Value::from(value),
            (None, None, value) => Value::from(value.unwrap_or(f64::NAN)),
        },
        Json::String(text) => {
            *size += text.len() as u64;
            Value::from(text.as_str())
        }
        Json::Array(items) => items.iter().map(|item| to_value(item, size)).collect(),
        Json::Object(map) => {
            let pairs = map.iter().map(|(key, value)| {
                *size += key.len() as u64;
                (key.as_str(), to_value(value, size))
            });
            Value::from_pairs(pairs.collect::<Vec<_>>())
        }
    }
}
