//! Dot products with keys and weighted sums of values, AVX2 and FMA.
//!
//! A score is one 8-lane accumulator over the channels, then a fixed tree over the lanes; eight keys go side by side
//! to hide the latency of the FMA, which changes no score's order. A weighted sum keeps up to 64 channels in registers
//! and takes the keys one after the other.

#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::micro::{Accumulate, Scores};
use crate::detect::Avx2;
use std::arch::x86_64::*;

/// The loops, in exchange for the proof that this machine can run them.
pub(super) fn loops(_proof: Avx2) -> (Scores, Accumulate) {
    (scores, accumulate)
}

fn scores(q: &[f32], k: &[f32], scale: f32, out: &mut [f32]) {
    assert_eq!(k.len(), q.len() * out.len(), "keys");
    // SAFETY: reachable through `loops` only, which asks for the proof of the features; the lengths were checked.
    unsafe { scores_impl(q, k, scale, out) }
}

fn accumulate(p: &[f32], v: &[f32], acc: &mut [f32]) {
    assert_eq!(v.len(), p.len() * acc.len(), "values");
    // SAFETY: as above.
    unsafe { accumulate_impl(p, v, acc) }
}

/// # Safety
/// `k` holds `out.len()` rows of `q.len()`.
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_impl(q: &[f32], k: &[f32], scale: f32, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match q.len() {
            32 => scores_of::<32>(q, k, scale, out),
            64 => scores_of::<64>(q, k, scale, out),
            128 => scores_of::<128>(q, k, scale, out),
            _ => scores_of::<0>(q, k, scale, out),
        }
    }
}

/// Scores with the usual head sizes as constants, for unrolled loops; `HEAD` 0 is any size.
///
/// # Safety
/// `k` holds `out.len()` rows of `q.len()`, which is `HEAD` unless that is 0.
#[target_feature(enable = "avx2,fma")]
unsafe fn scores_of<const HEAD: usize>(q: &[f32], k: &[f32], scale: f32, out: &mut [f32]) {
    let d = if HEAD == 0 { q.len() } else { HEAD };
    let groups = out.len() / 8;
    let (eights, rest) = out.as_chunks_mut::<8>();
    let vscale = _mm256_set1_ps(scale);
    for (g, out) in eights.iter_mut().enumerate() {
        // SAFETY: keys 8g .. 8g + 8 are whole rows of `k`; `out` is eight floats.
        unsafe {
            let sums = sum8(dots::<8>(q.as_ptr(), d, k.as_ptr().add(8 * g * d)));
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(sums, vscale));
        }
    }
    for (j, out) in rest.iter_mut().enumerate() {
        // SAFETY: key 8 groups + j is a whole row of `k`.
        let [acc] = unsafe { dots::<1>(q.as_ptr(), d, k.as_ptr().add((8 * groups + j) * d)) };
        *out = sum1(acc) * scale;
    }
}

/// Lane-wise partial products of `q` with `N` keys.
///
/// # Safety
/// `q` points to `d` numbers, `k` to `N` rows of as many.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn dots<const N: usize>(q: *const f32, d: usize, k: *const f32) -> [__m256; N] {
    let mut acc = [_mm256_setzero_ps(); N];
    let whole = d / 8 * 8;
    for c in (0..whole).step_by(8) {
        // SAFETY: c + 8 <= d.
        let x = unsafe { _mm256_loadu_ps(q.add(c)) };
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: channels c .. c + 8 of row j are inside of the rows.
            *acc = _mm256_fmadd_ps(x, unsafe { _mm256_loadu_ps(k.add(j * d + c)) }, *acc);
        }
    }
    if whole < d {
        let mask = tail_mask(d - whole);
        // SAFETY: the mask keeps the load inside of `q`.
        let x = unsafe { _mm256_maskload_ps(q.add(whole), mask) };
        for (j, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the mask keeps the load inside of row j.
            *acc = _mm256_fmadd_ps(x, unsafe { _mm256_maskload_ps(k.add(j * d + whole), mask) }, *acc);
        }
    }
    acc
}

/// The sums of eight registers: lanes i and i + 4, then neighbours, then pairs.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum8(x: [__m256; 8]) -> __m256 {
    // Registers i and i + 4 side by side, so that the neighbours come out in order.
    let half = |i: usize| {
        let (a, b) = (x[i], x[i + 4]);
        _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    };
    _mm256_hadd_ps(_mm256_hadd_ps(half(0), half(1)), _mm256_hadd_ps(half(2), half(3)))
}

/// The sum of a register, in the order of [`sum8`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum1(x: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let pairs = _mm_hadd_ps(half, half);
    _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs))
}

/// Ones in the first `n < 8` lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tail_mask(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// # Safety
/// `v` holds `p.len()` rows of `acc.len()`.
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate_impl(p: &[f32], v: &[f32], acc: &mut [f32]) {
    let d = acc.len();
    let mut c = 0;
    // SAFETY: each call covers channels c .. c + 8N <= d of every row.
    unsafe {
        while c + 64 <= d {
            columns::<8>(p, v, acc, c);
            c += 64;
        }
        if c + 32 <= d {
            columns::<4>(p, v, acc, c);
            c += 32;
        }
        if c + 16 <= d {
            columns::<2>(p, v, acc, c);
            c += 16;
        }
        if c + 8 <= d {
            columns::<1>(p, v, acc, c);
            c += 8;
        }
    }
    if c < d {
        let mask = tail_mask(d - c);
        // SAFETY: the mask keeps loads and stores inside of the row and of `acc`.
        unsafe {
            let mut a = _mm256_maskload_ps(acc.as_ptr().add(c), mask);
            for (j, &p) in p.iter().enumerate() {
                let x = _mm256_maskload_ps(v.as_ptr().add(j * d + c), mask);
                a = _mm256_fmadd_ps(_mm256_set1_ps(p), x, a);
            }
            _mm256_maskstore_ps(acc.as_mut_ptr().add(c), mask, a);
        }
    }
}

/// `acc[c .. c + 8N] += sum_j p[j] v[j][c .. c + 8N]`.
///
/// # Safety
/// `v` holds `p.len()` rows of `acc.len()`, and `c + 8N <= acc.len()`.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const N: usize>(p: &[f32], v: &[f32], acc: &mut [f32], c: usize) {
    let d = acc.len();
    let mut a = [_mm256_setzero_ps(); N];
    for (t, a) in a.iter_mut().enumerate() {
        // SAFETY: c + 8t + 8 <= acc.len().
        *a = unsafe { _mm256_loadu_ps(acc.as_ptr().add(c + 8 * t)) };
    }
    let (fours, rest) = p.as_chunks::<4>();
    let mut row = v.as_ptr().wrapping_add(c);
    for p in fours {
        for (j, &p) in p.iter().enumerate() {
            // SAFETY: channels c .. c + 8N of the next row but j.
            unsafe { add_row::<N>(&mut a, p, row.wrapping_add(j * d)) };
        }
        row = row.wrapping_add(4 * d);
    }
    for &p in rest {
        // SAFETY: channels c .. c + 8N of the next row.
        unsafe { add_row::<N>(&mut a, p, row) };
        row = row.wrapping_add(d);
    }
    for (t, &a) in a.iter().enumerate() {
        // SAFETY: c + 8t + 8 <= acc.len().
        unsafe { _mm256_storeu_ps(acc.as_mut_ptr().add(c + 8 * t), a) };
    }
}

/// `a += p * v`.
///
/// # Safety
/// `v` points to `8N` numbers.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_row<const N: usize>(a: &mut [__m256; N], p: f32, v: *const f32) {
    let p = _mm256_set1_ps(p);
    for (t, a) in a.iter_mut().enumerate() {
        // SAFETY: numbers 8t .. 8t + 8.
        *a = _mm256_fmadd_ps(p, unsafe { _mm256_loadu_ps(v.add(8 * t)) }, *a);
    }
}
