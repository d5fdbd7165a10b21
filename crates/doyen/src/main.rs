//! doyen
fn main() {}
