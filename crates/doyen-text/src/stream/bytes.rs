//! Bytes of tokens to characters: the GPT-2 byte alphabet, incremental UTF-8, runs of byte tokens.

/// The byte that a character of the GPT-2 alphabet stands for.
///
/// Printable bytes of Latin-1 stand for themselves; the 68 others follow from U+0100 on, in ascending order.
fn char_to_byte(c: char) -> Option<u8> {
    const fn printable(byte: u8) -> bool {
        matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
    }
    const SHIFTED: [u8; 68] = {
        let mut shifted = [0; 68];
        let (mut byte, mut count) = (0, 0);
        while byte < 256 {
            if !printable(byte as u8) {
                shifted[count] = byte as u8;
                count += 1;
            }
            byte += 1;
        }
        shifted
    };
    match u8::try_from(c) {
        Ok(byte) => printable(byte).then_some(byte),
        Err(_) => SHIFTED.get(c as usize - 0x100).copied(),
    }
}

/// Appends the bytes that a token spells, or the token itself if any character is outside of the alphabet.
pub(super) fn push_spelled(token: &str, out: &mut Vec<u8>) {
    let before = out.len();
    for c in token.chars() {
        let Some(byte) = char_to_byte(c) else {
            out.truncate(before);
            out.extend_from_slice(token.as_bytes());
            return;
        };
        out.push(byte);
    }
}

/// The byte of a token such as `<0x0A>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// Bytes that become text as soon as they are whole characters, with the same replacement characters as
/// [`String::from_utf8_lossy`] over the whole.
#[derive(Debug, Clone, Default)]
pub(super) struct Utf8Stream {
    /// Bytes not released yet; after [`release`](Self::release) at most three.
    pub pending: Vec<u8>,
}

impl Utf8Stream {
    /// Appends all characters that are decided and keeps an unfinished one.
    pub fn release(&mut self, out: &mut String) {
        let mut done = 0;
        while done < self.pending.len() {
            let rest = &self.pending[done..];
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    done = self.pending.len();
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&rest[..valid]));
                    done += valid;
                    match error.error_len() {
                        Some(bad) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            done += bad;
                        }
                        None => break,
                    }
                }
            }
        }
        self.pending.drain(..done);
    }

    /// Appends the unfinished character, if any, as one replacement character.
    pub fn finish(&mut self, out: &mut String) {
        self.release(out);
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

/// A run of byte tokens. It has no text before it ends: one bad byte turns all of it into replacement characters.
#[derive(Debug, Clone, Default)]
pub(super) struct ByteRun {
    pub bytes: Vec<u8>,
}

impl ByteRun {
    /// Ends the run and hands out its pieces.
    pub fn release(&mut self, mut piece: impl FnMut(String)) {
        if self.bytes.is_empty() {
            return;
        }
        match String::from_utf8(std::mem::take(&mut self.bytes)) {
            Ok(text) => piece(text),
            Err(error) => {
                for _ in 0..error.as_bytes().len() {
                    piece(char::REPLACEMENT_CHARACTER.into());
                }
            }
        }
    }

    /// Drops the whole characters of the run and keeps an unfinished one; whether anything was dropped.
    pub fn forget_complete(&mut self) -> bool {
        let valid = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        self.bytes.drain(..valid);
        valid > 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xe2>"), Some(0xe2));
        for other in ["<0xA>", "<0xAAA>", "<0x0G>", "0x0A", "<0xé>", "<0x>"] {
            assert_eq!(byte_token(other), None, "{other}");
        }
    }

    #[test]
    fn the_alphabet_is_a_bijection_with_known_corners() {
        let mut bytes: Vec<u8> = ('\0'..='\u{200}').filter_map(char_to_byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        for (c, byte) in
            [('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('a', b'a'), ('Ń', 0xad), ('ÿ', 0xff), ('Ā', 0)]
        {
            assert_eq!(char_to_byte(c), Some(byte), "{c}");
        }
        assert_eq!(char_to_byte(' '), None);
    }

    proptest! {
        #[test]
        fn the_stream_is_lossy_decoding_cut_anywhere(
            pieces in prop::collection::vec(
                prop::collection::vec(prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f), Just(0x98), Just(0x80)], 0..5),
                0..8,
            ),
        ) {
            let whole: Vec<u8> = pieces.concat();
            let mut stream = Utf8Stream::default();
            let mut text = String::new();
            for piece in &pieces {
                stream.pending.extend_from_slice(piece);
                stream.release(&mut text);
                prop_assert!(stream.pending.len() < 4);
            }
            stream.finish(&mut text);
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }
    }
}
