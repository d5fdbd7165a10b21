//! Closed pipes and full disks on stdout and stderr.

use super::common::{Place, Run, feed};
use std::process::Command;

/// Runs a shell line in which `$D` is the binary and `$P` a small package.
fn shell(place: &Place, line: &str) -> Run {
    Command::new("sh")
        .args(["-c", line])
        .env("D", env!("CARGO_BIN_EXE_doyen"))
        .env("P", place.arg())
        .env("T", place.dir.path())
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
        .into()
}

const VERBS: [&str; 5] = [
    "run $P -p 'one two' -n 6 --temperature 0",
    "show $P --graph",
    "show $P --json --graph",
    "eval $P --text $P/genai_config.json --window 16 --windows 1",
    "verify $P --tokens 2 --tolerance 1e9",
];

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::package();
    for verb in VERBS {
        // The reader is gone before anything is written, or after some bytes.
        for reader in ["true", "head -c 5"] {
            let run = shell(&place, &format!("{{ $D {verb}; echo code $? >&2; }} | {reader}"));
            assert!(run.stderr.ends_with("code 0\n"), "{verb} | {reader}: {run:?}");
            run.says(&[]);
            for word in ["error", "Broken pipe"] {
                assert!(!run.stderr.contains(word), "{verb} | {reader}: {run:?}");
            }
        }
    }
    let run = shell(&place, "{ printf 'hello\\nmore\\n' | $D chat $P -n 6; echo code $? >&2; } | true");
    assert!(run.stderr.ends_with("code 0\n") && !run.stderr.contains("error"), "{run:?}");
    let run = shell(&place, "{ $D convert --help; echo code $? >&2; } | head -c 5");
    assert!(run.stderr.ends_with("code 0\n"), "{run:?}");
    // What a check found is not lost with its reader.
    let run = shell(&place, "{ $D verify $P --tokens 2 --tolerance 1e-9; echo code $? >&2; } | true");
    assert!(run.stderr.ends_with("code 1\n"), "{run:?}");
}

#[test]
fn a_full_stdout_is_an_error() {
    let place = Place::package();
    for verb in VERBS {
        let run = shell(&place, &format!("$D {verb} >/dev/full"));
        assert_eq!(run.code, Some(2), "{verb}: {run:?}");
        run.says(&["error: cannot write to stdout", "No space left"]);
    }
    let run = shell(&place, "echo hello | $D chat $P -n 6 >/dev/full");
    assert_eq!(run.code, Some(2), "{run:?}");
    run.says(&["cannot write to stdout"]);
}

#[test]
fn a_full_or_closed_stderr_changes_nothing() {
    let place = Place::package();
    let text = shell(&place, "$D run $P -p 'one two' -n 6 --temperature 0").stdout;
    for stderr in ["2>/dev/full", "2>&-"] {
        let run = shell(&place, &format!("$D run $P -p 'one two' -n 6 --temperature 0 -v {stderr}"));
        assert_eq!((run.code, run.stdout), (Some(0), text.clone()), "{stderr}");
        assert_eq!(shell(&place, &format!("$D run /nowhere -p x {stderr}")).code, Some(2), "{stderr}");
    }
    assert_eq!(shell(&place, "$D run $P -p 'one two' -n 2 >&-").code, Some(0));
}

#[test]
fn a_saved_conversation_is_whole_or_not_there() {
    let place = Place::package();
    let kept = place.beside("kept.json");
    std::fs::write(&kept, "[]").unwrap();
    // Nothing but the conversation is written.
    let script = format!("ulimit -f 0; exec {} chat {} -n 2", env!("CARGO_BIN_EXE_doyen"), place.arg());
    let line = format!("hello\n/save {}\n", kept.display());
    let run = feed(Command::new("sh").args(["-c", &script]), line.as_bytes());
    assert_eq!(run.code, Some(2), "{run:?}");
    run.says(&["cannot write", "kept.json", "too large"]);
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "[]");
    assert_eq!(place.listing(), ["kept.json", "package"]);
}
