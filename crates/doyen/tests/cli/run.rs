//! `doyen run`: what is on stdout and stderr, and where prompts come from.

use super::common::{Place, Run, doyen, doyen_with};
use std::fs;

const GREEDY: [&str; 4] = ["--temperature", "0", "-n", "8"];

/// Runs a small package; its text is gibberish, but always the same.
fn small(place: &Place, args: &[&str]) -> Run {
    doyen(["run", place.arg()].iter().chain(args))
}

#[test]
fn stdout_is_the_text_and_stderr_the_summary() {
    let args = ["run", "-p", "To sort a list in Python", "-n", "4", "--temperature", "0"];
    let first = doyen(args);
    let text = first.ok();
    assert!(!text.is_empty() && !text.contains("tok/s") && !text.starts_with("To sort"), "{first:?}");
    let summary = first.stderr.trim();
    assert_eq!(summary.lines().count(), 1, "{first:?}");
    for part in ["prompt 6 tokens at ", " tok/s, 4 generated at ", "ended by length", "peak memory "] {
        assert!(summary.contains(part), "{part}: {summary}");
    }
    assert_eq!(doyen(args.iter().chain(&["--threads", "1"])).ok(), text, "one thread gives the same text");
    assert_eq!(doyen(args.iter().chain(&["--stats", "none", "--raw"])).stderr, "");
}

#[test]
fn a_seed_gives_the_same_text() {
    let place = Place::package();
    let draw = |seed: &str, threads: &str| {
        let args =
            ["-p", "one two", "-n", "12", "--temperature", "1.5", "--seed", seed, "--threads", threads];
        small(&place, &args).ok().to_owned()
    };
    let text = draw("7", "1");
    assert_eq!(draw("7", "2"), text);
    assert_eq!(draw("7", "3"), text);
    assert_ne!(draw("8", "1"), text);
}

#[test]
fn stats_as_json_are_the_last_line() {
    let place = Place::package();
    let run = small(&place, &["-p", "one two", "-n", "3", "--temperature", "0", "--stats", "json", "-v"]);
    run.ok();
    let last = run.stderr.lines().last().unwrap();
    let json: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(json["generated_tokens"], 3);
    assert_eq!(json["finish_reason"], "length");
    for key in
        ["prompt_tokens", "prompt_ms", "prompt_tok_s", "decode_ms", "decode_tok_s", "peak_memory_bytes"]
    {
        assert!(json[key].is_number(), "{key}: {json}");
    }
    assert!(run.stderr.contains("kv cache"), "-v prints the ledger: {}", run.stderr);
    let quiet = small(&place, &["-p", "one two", "-n", "3", "--stats", "json"]);
    assert_eq!(quiet.stderr.lines().count(), 1, "{quiet:?}");
}

#[test]
fn prompts_from_everywhere() {
    let place = Place::package();
    let text = small(&place, &[&["-p", "three words here"], &GREEDY[..]].concat()).ok().to_owned();
    let file = place.beside("prompt");
    fs::write(&file, "three words here").unwrap();
    assert_eq!(small(&place, &[&["--file", file.to_str().unwrap()], &GREEDY[..]].concat()).ok(), text);
    let piped = doyen_with(["run", place.arg()].iter().chain(&GREEDY), b"three words here");
    assert_eq!(piped.ok(), text);

    doyen_with(["run", place.arg()], &[0xff, 0xfe]).refused(&["stdin", "UTF-8"]);
    fs::write(&file, [0x80]).unwrap();
    small(&place, &["--file", file.to_str().unwrap()]).refused(&[file.to_str().unwrap(), "UTF-8"]);
    small(&place, &["--file", "/nowhere"]).refused(&["/nowhere", "No such file"]);
    small(&place, &["--file", place.arg()]).refused(&[place.arg()]);
    small(&place, &["--file", "/nowhere", "-p", "x"]).refused(&["cannot be used with"]);
}

#[test]
fn an_empty_prompt_needs_a_first_token() {
    // This tokenizer puts one before every text, the built-in model's does not.
    let place = Place::package();
    assert!(!small(&place, &["-p", "", "-n", "2"]).ok().is_empty());
    doyen(["run", "-p", "", "-n", "2"]).refused(&["prompt is empty", "-p"]);
    doyen(["run"]).refused(&["prompt is empty", "-p", "--file"]);
}

#[test]
fn stop_strings_across_tokens() {
    let place = Place::package();
    let text = small(&place, &[&["-p", "one two"], &GREEDY[..]].concat()).ok().to_owned();
    // Every cut of the text is reached exactly, wherever tokens begin and end, and the stop string is not shown.
    let chars: Vec<char> = text.chars().collect();
    for start in 1..chars.len().min(12) - 3 {
        let stop: String = chars[start..start + 3].iter().collect();
        let run = small(&place, &[&["-p", "one two", "--stop", &stop], &GREEDY[..]].concat());
        assert_eq!(run.ok(), &text[..text.find(&stop).unwrap()], "stop {stop:?} of {text:?}");
        assert!(run.stderr.contains("ended by stop"), "{run:?}");
    }
    let never = small(&place, &[&["-p", "one two", "--stop", "\u{1F980}\u{1F980}"], &GREEDY[..]].concat());
    assert_eq!(never.ok(), text);
    small(&place, &["-p", "x", "--stop", ""]).refused(&["stop string", "empty"]);
}

#[test]
fn the_context_is_never_cut_silently() {
    let place = Place::package();
    let long = "word ".repeat(40);
    let small_context = small(&place, &["-p", &long, "--context", "16"]);
    small_context.refused(&["the prompt has ", " tokens, the context holds 16", "--context"]);
    doyen(["run", place.arg(), "-p", &"word ".repeat(9000)]).refused(&["the context holds 2048"]);
    let full = small(&place, &["-p", "one two", "--context", "12", "-n", "100", "--temperature", "0"]);
    assert!(!full.ok().is_empty());
    assert!(full.stderr.contains("ended by context"), "{full:?}");
    small(&place, &["-p", "x", "--context", "2049"]).refused(&["2049", "context length of 2048"]);
}

#[test]
fn options_out_of_range() {
    for (args, words) in [
        (&["--temperature", "-1"][..], &["temperature", "0 or more", "-1"][..]),
        (&["--temperature", "nan"], &["temperature", "NaN"]),
        (&["--temperature", "inf"], &["temperature", "inf"]),
        (&["--temperature", "hot"], &["--temperature", "hot"]),
        (&["--top-p", "0"], &["top-p", "above 0, at most 1", "found 0"]),
        (&["--top-p", "1.5"], &["top-p", "1.5"]),
        (&["--top-k", "-3"], &["--top-k", "-3"]),
        (&["--min-p", "-0.1"], &["min-p", "0 to 1", "-0.1"]),
        (&["--repetition-penalty", "-2"], &["repetition penalty", "-2"]),
        (&["--frequency-penalty", "inf"], &["frequency penalty"]),
        (&["--seed", "-4"], &["--seed", "-4"]),
        (&["--seed", "99999999999999999999"], &["--seed"]),
        (&["--max-new-tokens", "0"], &["--max-new-tokens", "0"]),
        (&["-n", "-5"], &["--max-new-tokens", "-5"]),
        (&["--context", "0"], &["--context"]),
        (&["--threads", "0"], &["--threads"]),
        (&["--threads", "-2"], &["--threads", "-2"]),
        (&["--threads", "100000"], &["100000 threads", "at most"]),
        (&["--threads", "18446744073709551615"], &["threads", "at most"]),
        (&["--numerics", "quick"], &["--numerics", "fast", "exact"]),
        (&["--stats", "xml"], &["--stats", "json"]),
        (&["--raw", "--chat"], &["cannot be used with"]),
    ] {
        doyen(["run", "-p", "x"].iter().chain(args)).refused(words);
    }
    let extremes =
        ["run", "-p", "x", "-n", "2", "--temperature", "1e30", "--top-k", "99999999", "--top-p", "1e-30"];
    doyen(extremes).ok();
    doyen(["run", "-p", "x", "-n", "2", "--temperature", "1e-38", "--seed", "1"]).ok();
}
