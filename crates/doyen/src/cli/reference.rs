//! The CLI reference as Markdown, generated from the parser so that it cannot drift.

use super::Cli;
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::fmt::Write;

/// All verbs with their options and examples; `docs/cli.md` is this text.
pub fn reference() -> String {
    let mut root = Cli::command();
    root.build();
    let mut out = String::from(
        "# Command line\n\nGenerated from `doyen --help`: `cargo run -p doyen --example cli-reference > docs/cli.md`.\n\n\
         Results go to stdout and nothing else does; progress, summaries and errors go to stderr. Exit codes: 0 done, 1 a \
         check found a difference, 2 an error.\n\n\
         The environment variable `DOYEN_CPU` forces an instruction set (`scalar`, `avx2`, `avxvnni`, `avx512`, \
         `amx`, `neon`), for tests and comparisons; one that the machine does not have is an error. Without it the best one is taken. `doyen doctor` \
         says which there are.\n",
    );
    for verb in root.get_subcommands().filter(|c| c.get_name() != "help") {
        section(&mut out, verb);
    }
    out
}

fn section(out: &mut String, verb: &Command) {
    let about =
        verb.get_long_about().or_else(|| verb.get_about()).map(ToString::to_string).unwrap_or_default();
    let usage = verb.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "\n## doyen {}\n\n{about}\n\n    {usage}\n\n| option | meaning |\n|---|---|\n",
        verb.get_name()
    );
    for arg in verb.get_arguments().filter(|a| !["help", "version"].contains(&a.get_id().as_str())) {
        let _ = writeln!(out, "| {} | {} |", name(arg), meaning(arg));
    }
    if let Some(examples) = verb.get_after_help() {
        let text = examples.to_string();
        let text = text.trim_start_matches("Examples:").trim_start_matches('\n');
        let _ = write!(out, "\n```\n{text}\n```\n");
    }
}

fn name(arg: &Arg) -> String {
    let value = match arg.get_action() {
        ArgAction::Set | ArgAction::Append => arg
            .get_value_names()
            .map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
            .unwrap_or_default(),
        _ => String::new(),
    };
    let flags: Vec<String> = arg
        .get_short()
        .map(|s| format!("-{s}"))
        .into_iter()
        .chain(arg.get_long().map(|l| format!("--{l}")))
        .collect();
    if flags.is_empty() {
        format!("`{value}`")
    } else {
        format!("`{}`", format!("{} {value}", flags.join(", ")).trim())
    }
}

fn meaning(arg: &Arg) -> String {
    let mut text =
        arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    if arg.get_action().takes_values() {
        let values: Vec<String> = arg
            .get_possible_values()
            .iter()
            .map(|v| match v.get_help() {
                Some(help) => format!("`{}` ({help})", v.get_name()),
                None => format!("`{}`", v.get_name()),
            })
            .collect();
        if !values.is_empty() {
            let _ = write!(text, ": {}", values.join(", "));
        }
        let defaults: Vec<_> = arg.get_default_values().iter().map(|d| d.to_string_lossy()).collect();
        if !defaults.is_empty() {
            let _ = write!(text, " [default: {}]", defaults.join(" "));
        }
    }
    text.replace('|', "\\|").replace('\n', " ")
}
