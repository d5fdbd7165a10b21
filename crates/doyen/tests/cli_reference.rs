//! The committed CLI reference is the parser's.

#[test]
fn docs_have_not_drifted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");
    let committed = std::fs::read_to_string(path).expect("docs/cli.md can be read");
    assert!(
        committed == doyen::cli::reference(),
        "docs/cli.md is out of date: cargo run -p doyen --example cli-reference > docs/cli.md"
    );
}
