//! Logits to a token: penalties and the stream of random numbers. The choice itself is [`Draw`]'s, here or on the device.
//!
//! The order is that of Hugging Face's generation: penalties, temperature, top-k, top-p, min-p, draw. Temperature 0 is
//! greedy (after penalties) and draws nothing. The generator is SplitMix64: a seed gives the same stream of random numbers
//! everywhere, and the same tokens wherever the logits are the same.

use doyen_graph::device::{Choice, Draw, RANDOM_BITS};
use doyen_tensor::TokenId;
use std::collections::HashMap;

pub use doyen_graph::device::argmax;

/// How to choose.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; logits are divided by it otherwise.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 drops none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen so far, prompt included (CTRL, Keskar et al.
    /// 2019); 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence among the generated tokens.
    pub frequency_penalty: f32,
    /// Subtracted once from every token generated so far.
    pub presence_penalty: f32,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Checks the ranges.
    ///
    /// # Errors
    /// Names the parameter, its range and what was found.
    pub fn validate(&self) -> Result<(), String> {
        let check = |name: &str, ok: bool, range: &str, found: f32| {
            if ok { Ok(()) } else { Err(format!("{name}: expected {range}, found {found}")) }
        };
        check(
            "temperature",
            self.temperature >= 0.0 && self.temperature.is_finite(),
            "0 or more",
            self.temperature,
        )?;
        check("top-p", self.top_p > 0.0 && self.top_p <= 1.0, "above 0, at most 1", self.top_p)?;
        check("min-p", (0.0..=1.0).contains(&self.min_p), "0 to 1", self.min_p)?;
        let r = self.repetition_penalty;
        check("repetition penalty", r > 0.0 && r.is_finite(), "above 0", r)?;
        check("frequency penalty", self.frequency_penalty.is_finite(), "a number", self.frequency_penalty)?;
        check("presence penalty", self.presence_penalty.is_finite(), "a number", self.presence_penalty)
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}

/// How often a token came up.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    generated: u32,
}

/// A sequence's sampler: parameters, generator, and the tokens seen.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    state: u64,
    seen: HashMap<TokenId, Seen>,
    penalised: Vec<f32>,
    places: Vec<(u32, u32)>,
}

impl Sampler {
    /// A sampler for a sequence that starts with `prompt`.
    pub fn new(params: SamplingParams, prompt: &[TokenId]) -> Self {
        let state = params.seed;
        let seen = if params.penalises() {
            prompt.iter().map(|&t| (t, Seen::default())).collect()
        } else {
            HashMap::new()
        };
        Self { params, state, seen, penalised: Vec::new(), places: Vec::new() }
    }

    /// Makes room for `tokens` draws from logits of `vocab` numbers, which then allocate nothing.
    pub fn reserve(&mut self, tokens: usize, vocab: usize) {
        if self.params.penalises() {
            self.seen.reserve(tokens.min(vocab));
            self.penalised.reserve(vocab);
        }
        if self.params.temperature > 0.0 {
            self.places.reserve(vocab);
        }
    }

    /// The choice of the next token where its logits alone decide it; [`Sampler::advance`] goes on to the one after.
    pub fn draw(&self) -> Option<Draw> {
        (!self.params.penalises()).then(|| self.next())
    }

    /// Says that the token of [`Sampler::draw`] was chosen.
    pub fn advance(&mut self) {
        if self.params.temperature > 0.0 {
            self.state = self.state.wrapping_add(GAMMA);
        }
    }

    /// Chooses the next token from its logits `[vocab]` and remembers it.
    pub fn sample(&mut self, logits: &[f32]) -> Choice {
        let draw = self.next();
        let choice = if self.params.penalises() {
            let mut penalised = std::mem::take(&mut self.penalised);
            penalised.clear();
            penalised.extend_from_slice(logits);
            self.penalise(&mut penalised);
            let choice = draw.choose(&penalised, &mut self.places);
            self.penalised = penalised;
            if let Choice::Token(token) = choice {
                self.seen.entry(token).or_default().generated += 1;
            }
            choice
        } else {
            draw.choose(logits, &mut self.places)
        };
        self.advance();
        choice
    }

    fn next(&self) -> Draw {
        let p = &self.params;
        Draw {
            temperature: p.temperature,
            top_k: u32::try_from(p.top_k).unwrap_or(0),
            top_p: p.top_p,
            min_p: p.min_p,
            random: random(self.state.wrapping_add(GAMMA)),
        }
    }

    fn penalise(&self, logits: &mut [f32]) {
        let p = &self.params;
        for (token, seen) in &self.seen {
            let Some(l) = logits.get_mut(token.index()) else { continue };
            *l = if *l > 0.0 { *l / p.repetition_penalty } else { *l * p.repetition_penalty };
            if seen.generated > 0 {
                *l -= p.frequency_penalty * seen.generated as f32 + p.presence_penalty;
            }
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): the state's step, and a state's first [`RANDOM_BITS`] bits.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

fn random(state: u64) -> u32 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> (64 - RANDOM_BITS)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> SamplingParams {
        SamplingParams { temperature: 1.0, ..SamplingParams::default() }
    }

    #[test]
    fn a_seed_is_reproducible_and_known() {
        let draw = |seed| {
            let mut s = Sampler::new(SamplingParams { seed, ..params() }, &[]);
            (0..8).map(|_| s.sample(&[0.0; 64])).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn repetition_penalty_counts_the_prompt_and_presence_does_not() {
        let greedy = SamplingParams { temperature: 0.0, ..params() };
        let seen = [TokenId(0)];
        let mut s = Sampler::new(SamplingParams { repetition_penalty: 3.0, ..greedy.clone() }, &seen);
        assert_eq!(s.sample(&[2.0, 1.0]), Choice::Token(TokenId(1)));
        let mut s = Sampler::new(SamplingParams { presence_penalty: 3.0, ..greedy }, &seen);
        assert_eq!(s.sample(&[2.0, 1.0]), Choice::Token(TokenId(0)));
        assert_eq!(s.sample(&[2.0, 1.0]), Choice::Token(TokenId(1)));
    }

    /// A draw of the device's and the sampler's own are the same.
    #[test]
    fn a_draw_is_the_next_choice() {
        let p = SamplingParams { top_k: 3, top_p: 0.9, seed: 11, ..params() };
        let (mut own, mut other) = (Sampler::new(p.clone(), &[]), Sampler::new(p, &[]));
        for i in 0..50 {
            let logits = [0.1, 0.2 * i as f32, 2.0, 1.9, -1.0];
            let draw = other.draw().unwrap();
            assert_eq!(draw, other.draw().unwrap());
            assert_eq!(draw.choose(&logits, &mut Vec::new()), own.sample(&logits));
            other.advance();
        }
        let penalised = SamplingParams { presence_penalty: 1.0, ..params() };
        assert_eq!(Sampler::new(penalised, &[]).draw(), None);
    }
}
