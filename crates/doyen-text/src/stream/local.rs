//! Decoder steps that look at one token at a time.

use crate::tokenizer::Local;

/// Steps in order; each knows whether it has seen its first token.
#[derive(Debug, Clone)]
pub(super) struct LocalSteps {
    steps: Vec<(Local, bool)>,
}

impl LocalSteps {
    pub fn new(steps: &[Local]) -> Self {
        Self { steps: steps.iter().map(|step| (step.clone(), true)).collect() }
    }

    /// Behaves from now on as if a first token had passed.
    pub fn skip_first(&mut self) {
        for (_, first) in &mut self.steps {
            *first = false;
        }
    }

    /// Sends the next token through all steps.
    pub fn apply(&mut self, token: &mut String) {
        for (step, first) in &mut self.steps {
            apply(step, std::mem::replace(first, false), token);
        }
    }
}

fn apply(step: &Local, first: bool, token: &mut String) {
    match step {
        Local::Replace { pattern, content } => {
            if token.contains(pattern.as_str()) {
                *token = token.replace(pattern.as_str(), content);
            }
        }
        Local::Metaspace { mark, drop_first } => {
            if token.contains(*mark) {
                *token = token.replace(*mark, if first && *drop_first { "" } else { " " });
            }
        }
        Local::Strip { content, count } => {
            let cut: usize =
                token.chars().take(*count).take_while(|c| c == content).map(char::len_utf8).sum();
            token.drain(..cut);
        }
        Local::WordPiece { prefix, cleanup } => {
            if !first {
                match token.strip_prefix(prefix.as_str()) {
                    Some(rest) => *token = rest.to_owned(),
                    None => token.insert(0, ' '),
                }
            }
            if *cleanup {
                tidy(token);
            }
        }
        Local::Spaces => {
            if !first {
                token.insert(0, ' ');
            }
        }
    }
}

/// Spaces that English tokenization put before punctuation and contractions; the replacements and their order
/// are those of the WordPiece decoder of Hugging Face tokenizers.
fn tidy(token: &mut String) {
    const TIDY: [(&str, &str); 11] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    for (from, to) in TIDY {
        if token.contains(from) {
            *token = token.replace(from, to);
        }
    }
}
