//! Stop strings over streamed text.
//!
//! [`StopMatcher`] sees text in pieces of any size, as the detokenizer releases it, and finds stop strings
//! wherever they begin and end. It holds back exactly the text that may still turn out to be the beginning of
//! a stop string. It knows no tokens; end-of-sequence tokens are the caller's business.

/// Why a set of stop strings was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty stop string would end every answer before it begins.
    #[error("stop string {index} is empty; leave it out or give it text")]
    Empty {
        /// Position in the list that was given.
        index: usize,
    },
}

/// What one piece of text brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopStep<'a> {
    /// Text that is certainly not part of a stop string; to be shown.
    pub text: &'a str,
    /// The stop string that was found, as its index in the list given to [`StopMatcher::new`]. Nothing follows.
    pub stopped: Option<usize>,
}

/// Finds the first of several stop strings in streamed text.
///
/// The stop string that is *completed* first wins, since generation ends there; of several that are completed
/// by the same character the longest wins. The result depends on the text alone, not on how it was cut.
///
/// ```
/// let mut stops = doyen_text::StopMatcher::new(["\nUser:"])?;
/// assert_eq!(stops.push("Hello.\nUs").text, "Hello.");
/// assert_eq!(stops.push("eful, isn't it?\n").text, "\nUseful, isn't it?");
/// let last = stops.push("User: next");
/// assert_eq!((last.text, last.stopped), ("", Some(0)));
/// # Ok::<(), doyen_text::StopError>(())
/// ```
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    held: String,
    released: String,
    ended: bool,
}

impl StopMatcher {
    /// A matcher for `stops`; with none of them all text passes through at once.
    ///
    /// # Errors
    /// [`StopError::Empty`] when one of the strings is empty.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>) -> Result<Self, StopError> {
        let patterns = stops
            .into_iter()
            .enumerate()
            .map(|(index, stop)| Pattern::new(stop.as_ref()).ok_or(StopError::Empty { index }))
            .collect::<Result<_, _>>()?;
        Ok(Self { patterns, held: String::new(), released: String::new(), ended: false })
    }

    /// Takes the next piece of text and returns what can be shown now.
    ///
    /// After a stop string was found, or after [`finish`](Self::finish), further text is swallowed.
    pub fn push(&mut self, text: &str) -> StopStep<'_> {
        self.released.clear();
        if self.ended {
            return StopStep { text: "", stopped: None };
        }
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            if let Some((index, length)) = self.advance(byte) {
                self.held.push_str(&text[..=at]);
                self.ended = true;
                let shown = self.held.len() - length;
                self.released.push_str(&self.held[..shown]);
                self.held.clear();
                return StopStep { text: &self.released, stopped: Some(index) };
            }
        }
        self.held.push_str(text);
        let doubtful = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        let certain = self.held.len() - doubtful;
        self.released.push_str(&self.held[..certain]);
        self.held.drain(..certain);
        StopStep { text: &self.released, stopped: None }
    }

    /// Ends the stream and returns what was held back: an unfinished stop string is ordinary text.
    pub fn finish(&mut self) -> &str {
        self.ended = true;
        self.released.clear();
        std::mem::swap(&mut self.released, &mut self.held);
        &self.released
    }

    /// Feeds one byte to every pattern; the index and length of the longest pattern it completes.
    ///
    /// Both sides are UTF-8, so a match can begin only on a character boundary of the text.
    fn advance(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            if pattern.advance(byte) && best.is_none_or(|(_, length)| pattern.text.len() > length) {
                best = Some((index, pattern.text.len()));
            }
        }
        best
    }
}

/// One stop string with its Knuth-Morris-Pratt failure table and how much of it the text's end matches.
#[derive(Debug, Clone)]
struct Pattern {
    text: Box<[u8]>,
    /// `fallback[i]`: length of the longest proper prefix that is also a suffix of the first `i + 1` bytes.
    fallback: Box<[usize]>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Option<Self> {
        let text: Box<[u8]> = text.as_bytes().into();
        if text.is_empty() {
            return None;
        }
        let mut fallback = vec![0; text.len()].into_boxed_slice();
        let mut length = 0;
        for i in 1..text.len() {
            while length > 0 && text[i] != text[length] {
                length = fallback[length - 1];
            }
            length += usize::from(text[i] == text[length]);
            fallback[i] = length;
        }
        Some(Self { text, fallback, matched: 0 })
    }

    /// Whether `byte` completes the string. The matcher ends then, so there is no state after a match.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(self.text[self.matched] == byte);
        self.matched == self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, over the whole text: earliest end, then longest.
    fn reference(stops: &[String], text: &str) -> (String, Option<usize>) {
        let mut best: Option<(usize, usize, usize)> = None;
        for (index, stop) in stops.iter().enumerate() {
            if let Some(start) = text.find(stop.as_str()) {
                let end = start + stop.len();
                if best.is_none_or(|(e, s, _)| end < e || (end == e && start < s)) {
                    best = Some((end, start, index));
                }
            }
        }
        match best {
            Some((_, start, index)) => (text[..start].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    fn streamed(stops: &[String], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops).unwrap();
        let mut shown = String::new();
        let mut stopped = None;
        for piece in pieces {
            let step = matcher.push(piece);
            shown.push_str(step.text);
            stopped = stopped.or(step.stopped);
        }
        shown.push_str(matcher.finish());
        (shown, stopped)
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert_eq!(StopMatcher::new(["a", ""]).unwrap_err(), StopError::Empty { index: 1 });
    }

    #[test]
    fn without_stops_text_passes_at_once() {
        let mut matcher = StopMatcher::new::<&str>([]).unwrap();
        assert_eq!(matcher.push("héllo"), StopStep { text: "héllo", stopped: None });
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn only_the_doubtful_tail_is_held() {
        let mut matcher = StopMatcher::new(["</s>"]).unwrap();
        assert_eq!(matcher.push("a < b </").text, "a < b ");
        assert_eq!(matcher.push("b>").text, "</b>");
        assert_eq!(matcher.push("<").text, "");
        assert_eq!(matcher.finish(), "<");
        assert_eq!(matcher.push("more").text, "");
    }

    #[test]
    fn the_stop_completed_first_wins_and_ties_go_to_the_longest() {
        let stops = ["abcd", "bc", "c"].map(str::to_owned);
        assert_eq!(streamed(&stops, &["xab", "cd"]), ("xa".to_owned(), Some(1)));
    }

    #[test]
    fn a_stop_may_overlap_a_false_start_of_itself() {
        let stops = ["aab".to_owned()];
        assert_eq!(streamed(&stops, &["a", "a", "a", "b", "c"]), ("a".to_owned(), Some(0)));
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_over_the_whole_text(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            text in "[abcé😀]{0,40}",
            cuts in prop::collection::vec(0usize..80, 0..10),
        ) {
            let mut cuts: Vec<usize> =
                cuts.into_iter().filter(|&c| c <= text.len() && text.is_char_boundary(c)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let (expected, which) = reference(&stops, &text);
            let (shown, stopped) = streamed(&stops, &pieces);
            prop_assert_eq!(shown, expected);
            prop_assert_eq!(stopped.map(|i| &stops[i]), which.map(|i| &stops[i]));
        }
    }
}
