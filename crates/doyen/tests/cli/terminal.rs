//! `doyen chat` on a pseudo terminal: Ctrl-C stops the answer and not the program, Ctrl-D ends it, history is kept.

use super::common::{Place, Run};
use std::{fs, process::Command};

#[test]
fn interrupts_end_turns_and_history_stays() {
    let place = Place::package();
    let state = place.beside("state");
    let run: Run = Command::new("python3")
        .args(["-c", include_str!("terminal.py"), env!("CARGO_BIN_EXE_doyen"), "chat", place.arg()])
        .args(["--temperature", "1", "--seed", "1", "-n", "2000"])
        .env("XDG_STATE_HOME", &state)
        .env("TERM", "xterm")
        .output()
        .expect("python3 starts")
        .into();
    run.ok();
    let history = fs::read_to_string(state.join("doyen/history")).unwrap();
    for line in ["hello there", "/set max-new-tokens 2", "/quit"] {
        assert!(history.contains(line), "{history}");
    }
}
