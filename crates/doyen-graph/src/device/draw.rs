//! How a token is chosen from a row of logits, to the last bit.
//!
//! A device that chooses tokens itself gives the token that [`Draw::choose`] gives, whatever its order of summation: weights
//! are integers, and their exponential is made of products and sums that round the same everywhere. Host samplers use the
//! same function; penalties are theirs, before it.

use doyen_tensor::TokenId;

/// A choice from one row of logits. The order is that of Hugging Face's generation: temperature, top-k, top-p, min-p, draw.
/// Ties go to the lowest token id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// 0 takes the largest logit; logits are divided by it otherwise.
    pub temperature: f32,
    /// Keeps the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drops tokens less likely than this share of the likeliest; 0 drops none.
    pub min_p: f32,
    /// 24 random bits.
    pub random: u32,
}

/// What was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A token.
    Token(TokenId),
    /// There is no number among the logits.
    NotANumber,
}

/// Weight of the likeliest token.
const ONE: u64 = 1 << 40;

/// Exponents below this have no weight: e^-28 is less than `1 / ONE`.
const LEAST: f32 = -28.0;

/// Random bits of a [`Draw`].
pub const RANDOM_BITS: u32 = 24;

/// A token's place in the order of likelihood: its logit as [`key`], and its id.
type Place = (u32, u32);

impl Draw {
    /// The share that top-p keeps in units of 2^-32; `None` keeps all.
    pub fn top_p_share(&self) -> Option<u32> {
        (self.top_p < 1.0).then(|| (f64::from(self.top_p) * (1u64 << 32) as f64) as u32)
    }

    /// The weight that min-p asks for.
    pub fn least_weight(&self) -> u64 {
        (f64::from(self.min_p) * ONE as f64) as u64
    }

    /// Chooses from `logits`. `places` is room that is reused: as much as there are logits.
    pub fn choose(&self, logits: &[f32], places: &mut Vec<(u32, u32)>) -> Choice {
        let first = argmax(logits);
        let Some(&best) = logits.get(first.index()).filter(|l| !l.is_nan()) else {
            return Choice::NotANumber;
        };
        if self.temperature == 0.0 || best.is_infinite() {
            return Choice::Token(first);
        }
        let exponent = |l: f32| (l - best) / self.temperature;
        let last = self.last_kept(logits, exponent, places);
        let least = self.least_weight();
        let kept = logits.iter().enumerate().map(|(i, &l)| {
            let w = weight(exponent(l));
            let inside = last.is_none_or(|(k, id)| key(l) > k || (key(l) == k && i as u32 <= id));
            (TokenId(i as u32), if inside && w >= least { w } else { 0 })
        });
        let total: u64 = kept.clone().map(|(_, w)| w).sum();
        let target = share(total, self.random, RANDOM_BITS);
        let mut sum = 0;
        let chosen = kept.into_iter().find(|&(_, w)| {
            sum += w;
            sum > target
        });
        Choice::Token(chosen.map_or(first, |(token, _)| token))
    }

    /// The least likely token that top-k and top-p keep; `None` where they keep all that have weight.
    fn last_kept(
        &self,
        logits: &[f32],
        exponent: impl Fn(f32) -> f32,
        places: &mut Vec<Place>,
    ) -> Option<Place> {
        let share_kept = self.top_p_share();
        if self.top_k == 0 && share_kept.is_none() {
            return None;
        }
        places.clear();
        let weighty = logits.iter().enumerate().filter(|&(_, &l)| exponent(l) >= LEAST);
        places.extend(weighty.map(|(i, &l)| (key(l), i as u32)));
        let order = |a: &Place, b: &Place| b.0.cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.top_k as usize;
        if k > 0 && k < places.len() {
            places.select_nth_unstable_by(k - 1, order);
            places.truncate(k);
        }
        if let Some(share_kept) = share_kept {
            places.sort_unstable_by(order);
            let weights = || places.iter().map(|&(_, i)| weight(exponent(logits[i as usize])));
            let need = share(weights().sum(), share_kept, 32).max(1);
            let mut sum = 0;
            let reached = weights().position(|w| {
                sum += w;
                sum >= need
            });
            places.truncate(reached.map_or(places.len(), |n| n + 1));
        }
        places.iter().copied().max_by(order)
    }
}

/// `part / 2^bits` of `total`, rounded down.
fn share(total: u64, part: u32, bits: u32) -> u64 {
    ((u128::from(total) * u128::from(part)) >> bits) as u64
}

/// A number whose order is that of logits; NaN comes first.
fn key(logit: f32) -> u32 {
    if logit.is_nan() {
        return 0;
    }
    // -0 is 0.
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// 1.5 x 2^23: adding it rounds to a whole number.
const ROUND: f32 = 12_582_912.0;

/// [`ONE`] times e^x for x of 0 or less, rounded down; 0 for NaN. The polynomial is Cephes' (Moshier 1989).
fn weight(x: f32) -> u64 {
    if x.is_nan() || x < LEAST {
        return 0;
    }
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let y = (p * r * r + r) + 1.0;
    let mantissa = (y * (1 << 24) as f32) as u64;
    let shift = n as i32 + 16;
    if shift >= 0 { mantissa << shift } else { mantissa >> -shift }
}

/// Logits that [`argmax`] compares at once.
const LANES: usize = 32;

/// The token of the largest logit; ties go to the lowest id, NaN loses to every number.
pub fn argmax(logits: &[f32]) -> TokenId {
    // The value first, then its place, neither by one comparison after the other: 17 us instead of 113 for 151,936 logits.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &l) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, l);
        }
    }
    let best = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    let holds = |chunk: &[f32; LANES]| chunk.iter().map(|&l| u32::from(l == best)).sum::<u32>() > 0;
    let first = LANES * chunks.iter().position(holds).unwrap_or(chunks.len());
    let place = logits[first..].iter().position(|&l| l == best);
    TokenId(place.map_or(0, |i| first + i) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Draw {
        Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, random: 0 }
    }

    fn choose(draw: Draw, logits: &[f32]) -> Choice {
        draw.choose(logits, &mut Vec::new())
    }

    #[test]
    fn weights_are_the_exponential() {
        assert_eq!(weight(0.0), ONE);
        assert_eq!((weight(-28.1), weight(f32::NEG_INFINITY), weight(f32::NAN)), (0, 0, 0));
        for i in 0..2800 {
            let x = -0.01 * i as f32;
            let exact = f64::from(x).exp() * ONE as f64;
            let error = (weight(x) as f64 - exact).abs();
            assert!(error <= 2.5e-7 * exact + 1.0, "{x}: {} for {exact}", weight(x));
        }
    }

    /// What other implementations of the same function can be compared with.
    #[test]
    fn some_weights_are_these() {
        let found = [-0.5, -1.0, -3.25, -10.0, -20.0, -27.5].map(weight);
        assert_eq!(found, [666_887_520_256, 404_487_733_248, 42_632_691_712, 49_917_752, 2266, 1]);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [1.0f32, 0.0, -1.0, 2.0];
        let mut count = [0f64; 4];
        let n = 1 << 12;
        for i in 0..n {
            let draw = Draw { random: i << 12, ..all() };
            let Choice::Token(t) = choose(draw, &logits) else { panic!() };
            count[t.index()] += 1.0 / f64::from(n);
        }
        let z: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        for (c, l) in count.iter().zip(logits) {
            assert!((c - f64::from(l).exp() / z).abs() < 1e-3, "{c} for {l}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_survived() {
        assert_eq!(argmax(&[f32::NAN, 1.0]), TokenId(1));
        assert_eq!(argmax(&[f32::NAN; 70]), TokenId(0));
        assert_eq!(argmax(&[]), TokenId(0));
        let token = |i| Choice::Token(TokenId(i));
        for draw in [all(), Draw { temperature: 0.0, ..all() }, Draw { top_k: 2, top_p: 0.5, ..all() }] {
            assert_eq!(choose(draw, &[f32::NAN, f32::NEG_INFINITY, 3.0]), token(2));
            assert_eq!(choose(draw, &[f32::NAN; 3]), Choice::NotANumber);
            assert_eq!(choose(draw, &[]), Choice::NotANumber);
            assert_eq!(choose(draw, &[0.0, f32::INFINITY]), token(1));
            assert_eq!(choose(draw, &[f32::NAN, f32::NEG_INFINITY]), token(1));
        }
    }

    /// The set that a draw keeps, by its definition in float64.
    fn kept(draw: Draw, logits: &[f32]) -> Vec<bool> {
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if draw.top_k > 0 {
            order.truncate(draw.top_k as usize);
        }
        let p = |i: usize| f64::from((logits[i] - best) / draw.temperature).exp();
        let total: f64 = order.iter().map(|&i| p(i)).sum();
        let (mut sum, mut keep) = (0.0, vec![false; logits.len()]);
        for i in order {
            if sum < f64::from(draw.top_p) * total && p(i) >= f64::from(draw.min_p) {
                keep[i] = true;
            }
            sum += p(i);
        }
        keep
    }

    proptest! {
        /// Few values, so that many are equal.
        #[test]
        fn the_first_of_the_largest_is_found(values in proptest::collection::vec(-3i8..=3, 1..200)) {
            let logits: Vec<f32> = values.iter().map(|&v| if v == 0 { f32::NAN } else { f32::from(v) }).collect();
            let numbers = || values.iter().copied().filter(|&v| v != 0);
            let first = numbers().max().and_then(|best| values.iter().position(|&v| v == best)).unwrap_or(0);
            prop_assert_eq!(argmax(&logits).index(), first);
        }

        #[test]
        fn only_kept_tokens_are_drawn(
            values in proptest::collection::vec(-20i32..20, 2..40), top_k in 0u32..6, top_p in 0.05f32..1.2,
            min_p in 0f32..0.9, temperature in 0.2f32..2.0, random in 0u32..1 << RANDOM_BITS,
        ) {
            let logits: Vec<f32> = values.iter().map(|&v| v as f32 / 4.0).collect();
            let draw = Draw { temperature, top_k, top_p: top_p.min(1.0), min_p, random };
            let Choice::Token(token) = choose(draw, &logits) else { panic!() };
            prop_assert!(kept(draw, &logits)[token.index()], "{} of {:?}", token, logits);
        }
    }
}
