//! A conversation and the commands that change it.

use crate::{
    cli::run::summary,
    generate::{Options, Stats},
    model::Message,
};
use anyhow::{Context, Result};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

const HELP: &str = "\
/help                 this list
/system [TEXT]        set the system message and start over; without TEXT remove it
/reset                start over, keeping the system message
/save FILE            write the conversation as JSON
/load FILE            read one back
/set NAME VALUE       temperature, top-k, top-p, min-p, repetition-penalty, frequency-penalty,
                      presence-penalty, seed, max-new-tokens (0: no limit); /set alone shows them
/stats [on|off]       the last answer's rates; on and off show them after every answer
/quit                 leave (also Ctrl-D)

End a line with \\ to go on in the next, or put \"\"\" on lines of its own around a longer message.
Start a message with // to send one that begins with a slash.";

/// What the loop has to do with a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Print this.
    Said(String),
    /// Answer the conversation.
    Ask,
    /// Leave.
    Quit,
}

/// A conversation.
#[derive(Debug)]
pub(super) struct Session {
    messages: Vec<Message>,
    options: Options,
    last: Option<Stats>,
    show_stats: bool,
}

impl Session {
    pub(super) fn new(system: Option<String>, options: Options) -> Self {
        let mut session = Self { messages: Vec::new(), options, last: None, show_stats: false };
        session.set_system(system);
        session
    }

    pub(super) fn messages(&self) -> &[Message] {
        &self.messages
    }

    pub(super) const fn options(&self) -> &Options {
        &self.options
    }

    pub(super) const fn shows_stats(&self) -> bool {
        self.show_stats
    }

    /// The model's answer to the last message.
    pub(super) fn answered(&mut self, content: String, stats: Stats) {
        self.messages.push(Message::new("assistant", content));
        self.last = Some(stats);
    }

    /// Forgets the last message, which could not be answered.
    pub(super) fn take_back(&mut self) {
        self.messages.pop();
    }

    fn set_system(&mut self, system: Option<String>) {
        self.messages.clear();
        self.messages.extend(system.map(|content| Message::new("system", content)));
    }

    /// Takes a line: a command or a message.
    ///
    /// # Errors
    /// When the command is not known, or what it was given is of no use to it; nothing has changed then.
    pub(super) fn handle(&mut self, line: &str) -> Result<Reply> {
        let Some(command) = line.strip_prefix('/') else { return Ok(self.ask(line)) };
        if command.starts_with('/') {
            return Ok(self.ask(command));
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        self.command(name, rest.trim())
    }

    fn ask(&mut self, message: &str) -> Reply {
        self.messages.push(Message::new("user", message));
        Reply::Ask
    }

    fn command(&mut self, name: &str, rest: &str) -> Result<Reply> {
        let said = |text: &str| Ok(Reply::Said(text.to_owned()));
        match name {
            "help" => said(HELP),
            "system" => {
                self.set_system((!rest.is_empty()).then(|| rest.to_owned()));
                said(if rest.is_empty() {
                    "system message removed, conversation reset"
                } else {
                    "system message set, conversation reset"
                })
            }
            "reset" => {
                self.messages.retain(|m| m.role == "system");
                said("conversation reset")
            }
            "save" => self.save(Path::new(rest)),
            "load" => self.load(Path::new(rest)),
            "set" => self.set(rest),
            "stats" => self.stats(rest),
            "quit" | "exit" => Ok(Reply::Quit),
            _ => anyhow::bail!("/{name} is not a command; /help lists them"),
        }
    }

    fn save(&self, path: &Path) -> Result<Reply> {
        anyhow::ensure!(!path.as_os_str().is_empty(), "usage: /save FILE");
        let text = serde_json::to_string_pretty(&self.messages)?;
        write_whole(path, &(text + "\n")).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Reply::Said(format!("{} messages saved to {}", self.messages.len(), path.display())))
    }

    fn load(&mut self, path: &Path) -> Result<Reply> {
        anyhow::ensure!(!path.as_os_str().is_empty(), "usage: /load FILE");
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.messages = serde_json::from_slice(&text)
            .with_context(|| format!("{} is not a saved conversation", path.display()))?;
        Ok(Reply::Said(format!("{} messages loaded", self.messages.len())))
    }

    fn stats(&mut self, rest: &str) -> Result<Reply> {
        match rest {
            "on" | "off" => {
                self.show_stats = rest == "on";
                Ok(Reply::Said(format!("stats {rest}")))
            }
            "" => Ok(Reply::Said(self.last.as_ref().map_or_else(|| "no answer yet".into(), summary))),
            other => anyhow::bail!("/stats takes on, off or nothing, not {other:?}"),
        }
    }

    fn set(&mut self, rest: &str) -> Result<Reply> {
        if rest.is_empty() {
            return Ok(Reply::Said(self.settings()));
        }
        let (name, value) = rest.split_once(char::is_whitespace).context("usage: /set NAME VALUE")?;
        let value = value.trim();
        let mut options = self.options.clone();
        let s = &mut options.sampling;
        match name {
            "temperature" => s.temperature = parse(name, value)?,
            "top-k" => s.top_k = parse(name, value)?,
            "top-p" => s.top_p = parse(name, value)?,
            "min-p" => s.min_p = parse(name, value)?,
            "repetition-penalty" => s.repetition_penalty = parse(name, value)?,
            "frequency-penalty" => s.frequency_penalty = parse(name, value)?,
            "presence-penalty" => s.presence_penalty = parse(name, value)?,
            "seed" => s.seed = parse(name, value)?,
            "max-new-tokens" => options.max_new_tokens = Some(parse(name, value)?).filter(|&n: &usize| n > 0),
            _ => anyhow::bail!("{name} is not a setting; /set shows them"),
        }
        options.sampling.validate().map_err(anyhow::Error::msg)?;
        self.options = options;
        Ok(Reply::Said(format!("{name} is {value}")))
    }

    fn settings(&self) -> String {
        let s = &self.options.sampling;
        let limit = self.options.max_new_tokens.unwrap_or(0);
        format!(
            "temperature {}\ntop-k {}\ntop-p {}\nmin-p {}\nrepetition-penalty {}\nfrequency-penalty {}\n\
             presence-penalty {}\nseed {}\nmax-new-tokens {limit}",
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.frequency_penalty,
            s.presence_penalty,
            s.seed
        )
    }
}

/// Replaces a file by one that is complete, or leaves it as it was; what is no file (a pipe, say) is written to.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let path = match fs::canonicalize(path) {
        Ok(existing) if !existing.is_file() => return fs::write(existing, text),
        Ok(existing) => existing,
        Err(_) => path.to_owned(),
    };
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    fs::write(&part, text).and_then(|()| fs::rename(&part, &path)).inspect_err(|_| {
        // What is left of it is of no use.
        let _ = fs::remove_file(&part);
    })
}

fn parse<T: std::str::FromStr>(name: &str, value: &str) -> Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    value.parse().with_context(|| format!("{name} cannot be {value:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use doyen_runtime::SamplingParams;

    fn session() -> Session {
        let options = Options { max_new_tokens: None, sampling: SamplingParams::default(), stop: Vec::new() };
        Session::new(Some("Be brief.".into()), options)
    }

    fn said(session: &mut Session, line: &str) -> String {
        match session.handle(line) {
            Ok(Reply::Said(text)) => text,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn refused(session: &mut Session, line: &str) -> String {
        format!("{:#}", session.handle(line).unwrap_err())
    }

    #[test]
    fn messages_and_escaped_slashes_are_asked() {
        let mut s = session();
        assert_eq!(s.handle("hello").unwrap(), Reply::Ask);
        assert_eq!(s.handle("//etc/hosts").unwrap(), Reply::Ask);
        assert_eq!(s.messages()[2].content, "/etc/hosts");
        said(&mut s, "/reset");
        assert_eq!(s.messages().len(), 1);
        said(&mut s, "/system");
        assert!(s.messages().is_empty());
    }

    #[test]
    fn settings_are_checked_before_they_are_taken() {
        let mut s = session();
        assert_eq!(said(&mut s, "/set top-p 0.5"), "top-p is 0.5");
        assert!(refused(&mut s, "/set top-p 2").contains("top-p: expected above 0, at most 1, found 2"));
        assert!(refused(&mut s, "/set top-k x").contains("top-k cannot be \"x\""));
        assert!(said(&mut s, "/set").contains("top-p 0.5"));
        assert!(refused(&mut s, "/nope").contains("/help"));
    }

    #[test]
    fn conversations_survive_the_disk() {
        let path = std::env::temp_dir().join(format!("doyen-chat-{}.json", std::process::id()));
        let mut s = session();
        s.handle("one\ntwo").unwrap();
        said(&mut s, &format!("/save {}", path.display()));
        let before = s.messages().to_vec();
        said(&mut s, "/system");
        said(&mut s, &format!("/load {}", path.display()));
        assert_eq!(s.messages(), before);
        fs::write(&path, "{}").unwrap();
        assert!(refused(&mut s, &format!("/load {}", path.display())).contains("not a saved conversation"));
        assert_eq!(s.messages(), before);
        fs::remove_file(path).unwrap();
    }
}
