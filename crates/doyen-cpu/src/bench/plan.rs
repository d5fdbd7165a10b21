//! What a run will allocate, and the run: cases and the read loop in turn.

use super::{CaseReport, ReadLoop, Report, Rng, Spread, Subject, Work, report::name};
use crate::{detect::Isa, kernel::linear::Mode, pool::Pool};
use doyen_tensor::ByteCount;
use std::time::Instant;

/// Bytes of the read loop's buffer at least.
const READ: usize = 192 << 20;

/// Why something cannot be measured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BenchError {
    /// A size of 0.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// More bytes than an address has.
    #[error("{0} is more than the address space holds; give smaller sizes")]
    Overflow(&'static str),
    /// What no kernel takes.
    #[error("{0}")]
    Unsupported(String),
}

/// What cases run on.
#[derive(Debug, Clone, Copy)]
pub struct Env<'a> {
    /// The threads.
    pub pool: &'a Pool,
    /// The instruction set.
    pub isa: Isa,
    /// Numerics of products with quantized weights.
    pub mode: Mode,
}

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// Samples of each case at most.
    pub samples: usize,
    /// Seconds after which a case that has five samples gets no more.
    pub seconds: f64,
}

/// Samples that a case gets however long they take.
const FEWEST: usize = 5;

/// Subjects, token counts and copies, before anything is allocated.
pub struct Plan {
    subjects: Vec<Box<dyn Subject>>,
    copies: Vec<usize>,
    tokens: Vec<usize>,
    read: usize,
    bytes: usize,
}

impl Plan {
    /// Plans every subject at every number of tokens on a machine whose caches hold `cache` bytes.
    ///
    /// A copy comes up again after twice the caches' bytes were read, by whatever cases and by the read loop. Cases of
    /// one subject are as far apart in a round as they can be, so that the others help.
    ///
    /// # Errors
    /// When there is nothing to measure, a size is 0 or overflows, or no kernel takes it.
    pub fn new(
        env: &Env<'_>,
        subjects: Vec<Box<dyn Subject>>,
        tokens: &[usize],
        cache: usize,
    ) -> Result<Self, BenchError> {
        let fewest = *tokens.iter().min().ok_or(BenchError::Zero("the number of token counts"))?;
        if fewest == 0 {
            return Err(BenchError::Zero("tokens"));
        }
        let cold = cache.saturating_mul(2);
        let sample = ReadLoop::sample_len(env.pool.threads());
        let own = |s: &dyn Subject| s.touched(fewest).saturating_add(sample);
        let between = subjects.iter().fold(0usize, |sum, s| sum.saturating_add(own(s.as_ref())));
        let read = cold.saturating_add(sample).max(READ).next_multiple_of(sample);
        let mut copies = Vec::with_capacity(subjects.len());
        let mut bytes = Some(read);
        for s in &subjects {
            let n = cold.saturating_add(s.touched(fewest)).div_ceil(between.max(1)).max(1);
            copies.push(n);
            bytes = bytes.and_then(|b| b.checked_add(s.bytes()?.checked_mul(n)?));
            for &t in tokens {
                let call = s.call_bytes(env, t)?;
                bytes = bytes.and_then(|b| b.checked_add(call?));
            }
        }
        let bytes = bytes.ok_or(BenchError::Overflow("the memory to measure in"))?;
        Ok(Self { subjects, copies, tokens: tokens.to_vec(), read, bytes })
    }

    /// Bytes that [`Plan::build`] will allocate.
    pub const fn bytes(&self) -> ByteCount {
        ByteCount(self.bytes as u64)
    }

    /// Cases it has.
    pub const fn cases(&self) -> usize {
        self.subjects.len() * self.tokens.len()
    }

    /// Allocates and fills everything.
    ///
    /// # Errors
    /// When no kernel takes a subject.
    pub fn build<'a>(&self, env: &Env<'a>) -> Result<Suite<'a>, BenchError> {
        let mut rng = Rng::default();
        let mut by_subject = Vec::with_capacity(self.subjects.len());
        for (s, &copies) in self.subjects.iter().zip(&self.copies) {
            by_subject.push(s.works(env, &mut rng, copies, &self.tokens)?.into_iter());
        }
        let mut works = Vec::with_capacity(self.cases());
        for _ in &self.tokens {
            works.extend(by_subject.iter_mut().enumerate().filter_map(|(i, works)| Some((i, works.next()?))));
        }
        let read = ReadLoop::new(self.read, env.pool.threads())?;
        Ok(Suite { pool: env.pool, works, read })
    }
}

/// Cases with their memory.
pub struct Suite<'a> {
    pool: &'a Pool,
    /// Each with the number of its subject, whose copies it shares with others.
    works: Vec<(usize, Box<dyn Work + 'a>)>,
    read: ReadLoop,
}

/// The samples of a case.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    rates: Vec<f64>,
    shares: Vec<f64>,
}

impl Samples {
    fn wants_more(&self, rounds: Rounds) -> bool {
        let n = self.seconds.len();
        n < rounds.samples && (n < FEWEST || self.seconds.iter().sum::<f64>() < rounds.seconds)
    }
}

impl Suite<'_> {
    /// Keeps the cases whose names `keep` wants.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.works.retain(|(_, w)| keep(&name(&w.labels())));
    }

    /// Runs all cases in turn, the read loop before and after each; one round that does not count goes first. `tick` is
    /// called after every call.
    pub fn measure(&mut self, rounds: Rounds, mut tick: impl FnMut()) -> Report {
        let mut samples: Vec<Samples> = self.works.iter().map(|_| Samples::default()).collect();
        let mut reads = Vec::new();
        // Calls of each subject so far: another copy of its weights every time, whatever case the call is of.
        let mut calls = vec![0; self.works.iter().map(|(subject, _)| subject + 1).max().unwrap_or(0)];
        for round in 0..=rounds.samples {
            let mut before = self.read.sample(self.pool);
            let mut done = true;
            for ((subject, work), samples) in self.works.iter_mut().zip(&mut samples) {
                if !samples.wants_more(rounds) {
                    continue;
                }
                done = false;
                let bytes = work.prepare(calls[*subject]) as f64;
                calls[*subject] += 1;
                let start = Instant::now();
                work.run();
                let seconds = start.elapsed().as_secs_f64();
                let after = self.read.sample(self.pool);
                if round > 0 {
                    let (rate, floor) = (bytes / seconds, rate_of(before, after));
                    samples.seconds.push(seconds);
                    samples.rates.push(rate);
                    samples.shares.push(rate / floor);
                    reads.push(floor);
                }
                before = after;
                tick();
            }
            if done {
                break;
            }
        }
        let cases = self.works.iter().zip(samples).map(|((_, work), s)| CaseReport {
            labels: work.labels(),
            macs: work.macs(),
            seconds: Spread::of(s.seconds),
            rate: Spread::of(s.rates),
            share: Spread::of(s.shares),
        });
        Report { threads: self.pool.threads(), read: Spread::of(reads), cases: cases.collect() }
    }
}

/// Bytes a second of two samples together.
fn rate_of((a, s): (usize, f64), (b, t): (usize, f64)) -> f64 {
    (a + b) as f64 / (s + t)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bench::Labels, detect::Isa, kernel::linear::Mode};
    use std::{
        num::NonZeroUsize,
        sync::{Arc, Mutex},
    };

    /// Remembers which call numbers its works were prepared for.
    struct Fake(Arc<Mutex<Vec<usize>>>);

    impl Subject for Fake {
        fn bytes(&self) -> Option<usize> {
            Some(1)
        }
        fn touched(&self, _: usize) -> usize {
            1
        }
        fn call_bytes(&self, _: &Env<'_>, _: usize) -> Result<Option<usize>, BenchError> {
            Ok(Some(0))
        }
        fn works<'a>(
            &self,
            _: &Env<'a>,
            _: &mut Rng,
            _: usize,
            tokens: &[usize],
        ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
            Ok(tokens.iter().map(|_| Box::new(Fake(Arc::clone(&self.0))) as Box<dyn Work + 'a>).collect())
        }
    }

    impl Work for Fake {
        fn labels(&self) -> Labels {
            vec![("fake", "yes".to_owned())]
        }
        fn macs(&self) -> f64 {
            1.0
        }
        fn prepare(&mut self, call: usize) -> usize {
            self.0.lock().unwrap().push(call);
            1
        }
        fn run(&mut self) {}
    }

    #[test]
    fn cases_of_one_subject_never_read_the_copy_that_another_has_just_read() {
        let pool = Pool::new(NonZeroUsize::MIN, false).unwrap();
        let env = Env { pool: &pool, isa: Isa::Scalar, mode: Mode::Fast };
        let calls: [Arc<Mutex<Vec<usize>>>; 2] = Default::default();
        let subjects = calls.iter().map(|c| Box::new(Fake(Arc::clone(c))) as Box<dyn Subject>).collect();
        let mut suite = Plan::new(&env, subjects, &[1, 8, 128], 0).unwrap().build(&env).unwrap();
        suite.measure(Rounds { samples: 2, seconds: 1.0 }, || {});
        for calls in calls {
            assert_eq!(*calls.lock().unwrap(), (0..9).collect::<Vec<_>>());
        }
    }
}
