//! A chat template and its variables: the bytes before the first zero byte, and the JSON object after it.
#![no_main]

use doyen_text::{Now, template::render};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (template, variables) = match data.iter().position(|&b| b == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &b"{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}"[..]),
    };
    let _ = render(template, variables, Now::from_unix(0));
});
