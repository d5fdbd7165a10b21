//! Streaming against the whole decode, for every kind of tokenizer.

mod fixtures;

use doyen_tensor::TokenId;
use doyen_text::{Detokenizer, Specials, Tokenizer};
use fixtures::{all, byte_fallback, byte_level, load, shared};
use proptest::prelude::*;

fn check(name: &str, tokenizer: &Tokenizer, ids: &[TokenId], specials: Specials) {
    let mut stream = Detokenizer::with_specials(tokenizer, specials);
    let mut text = String::new();
    for (i, &id) in ids.iter().enumerate() {
        text.push_str(stream.push(id));
        let whole = tokenizer.decode(&ids[..=i], specials).unwrap();
        assert!(whole.starts_with(&text), "{name}: {text:?} does not begin {whole:?} of {:?}", &ids[..=i]);
        let finished = text.clone() + stream.clone().finish();
        assert_eq!(finished, whole, "{name}: {:?}", &ids[..=i]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn at_every_point_the_stream_equals_the_whole_decode(
        raw in prop::collection::vec(any::<prop::sample::Index>(), 1..24),
        keep in any::<bool>(),
    ) {
        let specials = if keep { Specials::Keep } else { Specials::Skip };
        for (name, tokenizer) in all() {
            // Two ids beyond the vocabulary, as a padded head can produce them.
            let ids: Vec<TokenId> =
                raw.iter().map(|i| TokenId(i.index(tokenizer.vocab_size() + 2) as u32)).collect();
            check(name, &tokenizer, &ids, specials);
        }
    }

    #[test]
    fn encoded_text_streams_back(text in "[a-z éñ😀日\n]{0,30}") {
        for (name, tokenizer) in all() {
            let ids = tokenizer.encode(&text).unwrap();
            check(name, &tokenizer, &ids, Specials::Skip);
        }
    }

    #[test]
    fn a_continuation_is_what_the_prompt_lacks(prompt in "[hielo é😀]{0,12}", cut in any::<prop::sample::Index>()) {
        for (name, tokenizer) in [("byte_level", load(&byte_level())), ("byte_fallback", load(&byte_fallback()))] {
            let ids = tokenizer.encode(&prompt).unwrap();
            let (before, after) = ids.split_at(cut.index(ids.len() + 1));
            let mut stream = Detokenizer::continuing(&tokenizer, before);
            let mut text = String::new();
            for &id in after {
                text.push_str(stream.push(id));
            }
            text.push_str(stream.finish());
            let whole = tokenizer.decode(&ids, Specials::Skip).unwrap();
            // What a reader of the prompt has seen: the characters that its tokens complete.
            let seen = |n: usize| tokenizer.decode(&before[..n], Specials::Skip).unwrap();
            let shown = (0..=before.len()).rev().map(seen).find(|text| !text.ends_with('\u{fffd}')).unwrap();
            prop_assert_eq!(format!("{shown}{text}"), whole, "{}", name);
        }
    }
}

#[test]
fn an_emoji_split_over_tokens_appears_once_and_whole() {
    let tokenizer = load(&byte_level());
    let ids = tokenizer.encode("é😀").unwrap();
    assert!(ids.len() > 3);
    let mut stream = Detokenizer::new(&tokenizer);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).to_owned()).collect();
    assert_eq!(pieces.iter().filter(|p| !p.is_empty()).collect::<Vec<_>>(), ["é", "😀"]);
    assert_eq!(stream.finish(), "");
}

#[test]
fn the_space_before_the_first_word_depends_on_what_came_before() {
    let tokenizer = load(&byte_fallback());
    let hi = tokenizer.token_to_id("▁hi").unwrap();
    assert_eq!(Detokenizer::new(&tokenizer).push(hi), "hi");
    assert_eq!(Detokenizer::continuing(&tokenizer, &[TokenId(1), hi]).push(hi), " hi");
    assert_eq!(Detokenizer::continuing(&tokenizer, &[TokenId(1)]).push(hi), "hi");
}

#[test]
fn the_end_of_the_prompt_is_not_repeated() {
    let tokenizer = load(&byte_fallback());
    let prompt = tokenizer.encode("hi\n").unwrap();
    let hi = tokenizer.token_to_id("hi").or_else(|| tokenizer.token_to_id("▁hi")).unwrap();
    assert_eq!(Detokenizer::continuing(&tokenizer, &prompt).push(hi), " hi");
}

#[test]
fn golden_answers_stream_to_their_text() {
    let tokenizer = Tokenizer::from_bytes(&shared("models/docmoe-hf/tokenizer.json"), None).unwrap();
    let text = String::from_utf8(shared("models/docmoe-hf/heldout.txt")).unwrap();
    let ids = tokenizer.encode(&text).unwrap();
    let mut stream = Detokenizer::new(&tokenizer);
    let mut streamed = String::new();
    for &id in &ids {
        streamed.push_str(stream.push(id));
    }
    streamed.push_str(stream.finish());
    assert_eq!(streamed, tokenizer.decode(&ids, Specials::Skip).unwrap());
}
