//! Prints the CLI reference; `docs/cli.md` is its output.

fn main() {
    print!("{}", doyen::cli::reference());
}
