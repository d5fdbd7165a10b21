//! `doyen chat` in a script: messages on stdin, answers alone on stdout.

use super::common::{Place, Run, command, doyen_with, feed};
use std::fs;

fn chat(place: &Place, args: &[&str], lines: &str) -> Run {
    let all = ["chat", place.arg(), "--temperature", "0", "-n", "4"];
    doyen_with(all.iter().chain(args), lines.as_bytes())
}

#[test]
fn answers_alone_are_on_stdout() {
    let place = Place::package();
    let one = chat(&place, &[], "hello\n");
    let answer = one.ok().to_owned();
    assert!(answer.ends_with('\n') && answer.len() > 1, "{one:?}");
    assert_eq!(one.stderr, "");
    // Commands and blank lines leave stdout alone; after a reset the same question has the same answer.
    let more = chat(&place, &[], "\n/help\nhello\n/reset\n   \nhello\n/stats\n/quit\nnot read\n");
    assert_eq!(more.ok(), answer.repeat(2));
    more.says(&["/system", "/load FILE", "conversation reset", "4 generated", "ended by"]);
    assert_eq!(chat(&place, &[], "").ok(), "");
    assert_eq!(chat(&place, &[], "hello").ok(), answer, "the last line need not end");
}

#[test]
fn the_conversation_is_remembered_saved_and_loaded() {
    let place = Place::package();
    let file = place.beside("talk.json");
    let script = format!("/system Be brief.\nhello\n/save {}\nand then?\n", file.display());
    let whole = chat(&place, &[], &script);
    let answers = whole.ok();
    let saved: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(saved[0], serde_json::json!({"role": "system", "content": "Be brief."}));
    assert_eq!(saved[1], serde_json::json!({"role": "user", "content": "hello"}));
    let first = saved[2]["content"].as_str().unwrap();
    assert!(answers.starts_with(first), "{answers:?} {first:?}");

    let resumed = chat(&place, &[], &format!("/load {}\nand then?\n", file.display()));
    assert_eq!(format!("{first}\n{}", resumed.ok()), answers);
    let system = chat(&place, &["--system", "Be brief."], "hello\n");
    assert_eq!(system.ok(), format!("{first}\n"));
    assert_ne!(chat(&place, &[], "hello\n").ok(), system.stdout, "the system message is seen");
}

#[test]
fn settings_and_statistics() {
    let place = Place::package();
    let run = chat(
        &place,
        &[],
        "/set max-new-tokens 2\n/set\n/stats on\nhello\n/set temperature 9\n/set seed 3\nhello\n",
    );
    run.ok();
    run.says(&[
        "max-new-tokens is 2",
        "temperature 0",
        "stats on",
        "2 generated",
        "temperature is 9",
        "seed is 3",
    ]);
}

#[test]
fn messages_of_several_lines() {
    let place = Place::package();
    let file = place.beside("talk.json");
    let said = |lines: &str| {
        let run = chat(&place, &[], &format!("{lines}/save {}\n", file.display()));
        run.ok();
        let saved: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        saved[0]["content"].as_str().unwrap().to_owned()
    };
    assert_eq!(said("one \\\ntwo\\\nthree\n"), "one \ntwo\nthree");
    assert_eq!(said("\"\"\"\none\n\n/two\\\n\"\"\"\n"), "one\n\n/two\\");
    assert_eq!(said("//not a command\n"), "/not a command");
    // The end of the input ends a message, too.
    assert!(!chat(&place, &[], "\"\"\"\nhello").ok().is_empty());
    assert!(!chat(&place, &[], "hello\\").ok().is_empty());
}

#[test]
fn what_is_refused_is_told_and_the_conversation_goes_on() {
    let place = Place::package();
    let answer = chat(&place, &[], "hello\n").stdout;
    for (line, words) in [
        ("/hlep", &["/hlep", "/help"][..]),
        ("/set temperature -1", &["temperature", "0 or more", "-1"]),
        ("/set top-k many", &["top-k", "many"]),
        ("/set color red", &["color", "/set"]),
        ("/set temperature", &["usage: /set NAME VALUE"]),
        ("/stats maybe", &["on, off", "maybe"]),
        ("/save", &["usage: /save FILE"]),
        ("/save /nowhere/deep/talk.json", &["/nowhere/deep/talk.json", "No such file"]),
        ("/load", &["usage: /load FILE"]),
        ("/load /nowhere/talk.json", &["/nowhere/talk.json", "No such file"]),
        ("/load /dev/null", &["/dev/null", "not a saved conversation"]),
    ] {
        let run = chat(&place, &[], &format!("{line}\nhello\n"));
        assert_eq!((run.code, &run.stdout), (Some(2), &answer), "{line}: {run:?}");
        run.says(words);
    }
    let run = doyen_with(["chat", place.arg()], b"\xff\xfe\n");
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{run:?}");
    run.says(&["error: ", "UTF-8"]);
}

#[test]
fn a_full_context_says_what_to_do() {
    let place = Place::package();
    let long = "many words ".repeat(30);
    let run = chat(&place, &["--context", "64"], &format!("{long}\nhello\n"));
    assert_eq!(run.code, Some(2), "{run:?}");
    run.says(&["the conversation has ", "the context holds 64", "not sent", "/reset", "--context"]);
    assert!(
        !run.stdout.is_empty(),
        "the message that was refused is forgotten, the next one answered: {run:?}"
    );

    let run = chat(&place, &["--context", "24"], "/set max-new-tokens 1000\nhello\n");
    run.ok();
    run.says(&["the context of 24 positions is full", "cut short", "/reset"]);
}

#[test]
fn nothing_is_written_without_a_terminal() {
    let place = Place::package();
    let state = place.beside("state");
    let mut command = command(["chat", place.arg(), "-n", "1"]);
    feed(command.env("XDG_STATE_HOME", &state), b"hello\n").ok();
    assert!(!state.exists(), "no history of piped input");
}
