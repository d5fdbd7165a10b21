//! Tile registers: the shapes they get, and the instructions on them.
//!
//! A product is `C[16 tokens, 16 rows] = A[16 tokens, K] * B[K, 16 rows]` over the `K = 4 * words` columns of a group. `A` is row after
//! row; `B` is a row for each four columns, in it a word of four for each weight row; `C` is i32.

use std::arch::asm;

/// Tokens, and weight rows, of a product.
pub(super) const TILE: usize = 16;
/// Bytes from row to row of every operand.
pub(super) const STRIDE: usize = 64;

/// Registers that hold C, and those that hold A and B, in turn: products that follow each other share none.
const C: [usize; AT_ONCE] = [0, 1, 2, 3];
const A: [usize; 2] = [4, 6];
const B: [usize; 2] = [5, 7];
/// Products that [`Tiles::products`] does.
pub(super) const AT_ONCE: usize = 4;

/// Tile registers of the calling thread, set up for products of one size until they are dropped.
pub(super) trait Tiles {
    /// Sets them up for groups of `4 * words` columns, at most 64.
    ///
    /// # Safety
    /// The instructions are there and may be used; the thread has no other value of the type.
    unsafe fn new(words: usize) -> Self;

    /// One product of signed bytes. Rows of every operand are [`STRIDE`] bytes apart.
    ///
    /// # Safety
    /// The thread is the one of [`Tiles::new`]; the pointers are good for the operands.
    unsafe fn product(&mut self, a: *const u8, b: *const u8, c: *mut i32);

    /// One product over twice as many columns: those at `a` and `b`, and those `step` bytes behind them.
    ///
    /// # Safety
    /// As [`Tiles::product`].
    unsafe fn long_product(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize);

    /// [`AT_ONCE`] products: operands are `step` bytes apart, results follow each other.
    ///
    /// # Safety
    /// As [`Tiles::product`].
    unsafe fn products(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize);
}

/// What `ldtilecfg` loads: the palette in byte 0, bytes a row of each register from byte 16 on (u16), rows from byte 48 on.
#[repr(align(64))]
struct Config([u8; 64]);

impl Config {
    const fn new(words: usize) -> Self {
        let mut config = Self([0; 64]);
        config.0[0] = 1;
        let mut i = 0;
        while i < AT_ONCE {
            config.shape(C[i], TILE, 4 * TILE);
            config.shape(A[i % 2], TILE, 4 * words);
            config.shape(B[i % 2], words, 4 * TILE);
            i += 1;
        }
        config
    }

    const fn shape(&mut self, tile: usize, rows: usize, row_bytes: usize) {
        self.0[16 + 2 * tile] = row_bytes as u8;
        self.0[48 + tile] = rows as u8;
    }
}

/// The instructions of AMX-INT8. The compiler emits none of its own; the kernel of the system keeps the registers and their
/// configuration for each thread.
pub(super) struct Amx(());

impl Tiles for Amx {
    #[inline(always)]
    unsafe fn new(words: usize) -> Self {
        let config = Config::new(words);
        // SAFETY: the caller's promise; the configuration is 64 bytes, and valid for at most 16 words.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly));
        };
        Self(())
    }

    #[inline(always)]
    unsafe fn product(&mut self, a: *const u8, b: *const u8, c: *mut i32) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{a} + {stride}*1]",
                "tileloadd tmm5, [{b} + {stride}*1]",
                "tdpbssd tmm0, tmm4, tmm5",
                "tilestored [{c} + {stride}*1], tmm0",
                a = in(reg) a,
                b = in(reg) b,
                c = in(reg) c,
                stride = in(reg) STRIDE,
                out("tmm0") _, out("tmm4") _, out("tmm5") _,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn long_product(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{a} + {stride}*1]",
                "tileloadd tmm5, [{b} + {stride}*1]",
                "add {a}, {step}",
                "add {b}, {step}",
                "tdpbssd tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{a} + {stride}*1]",
                "tileloadd tmm7, [{b} + {stride}*1]",
                "tdpbssd tmm0, tmm6, tmm7",
                "tilestored [{c} + {stride}*1], tmm0",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                c = in(reg) c,
                step = in(reg) step,
                stride = in(reg) STRIDE,
                out("tmm0") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    #[inline(always)]
    unsafe fn products(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{a} + {stride}*1]",
                "tileloadd tmm5, [{b} + {stride}*1]",
                "add {a}, {step}",
                "add {b}, {step}",
                "tdpbssd tmm0, tmm4, tmm5",
                "tilezero tmm1",
                "tileloadd tmm6, [{a} + {stride}*1]",
                "tileloadd tmm7, [{b} + {stride}*1]",
                "add {a}, {step}",
                "add {b}, {step}",
                "tdpbssd tmm1, tmm6, tmm7",
                "tilezero tmm2",
                "tileloadd tmm4, [{a} + {stride}*1]",
                "tileloadd tmm5, [{b} + {stride}*1]",
                "add {a}, {step}",
                "add {b}, {step}",
                "tdpbssd tmm2, tmm4, tmm5",
                "tilezero tmm3",
                "tileloadd tmm6, [{a} + {stride}*1]",
                "tileloadd tmm7, [{b} + {stride}*1]",
                "tdpbssd tmm3, tmm6, tmm7",
                "tilestored [{c} + {stride}*1], tmm0",
                "tilestored [{c} + {stride}*1 + 1024], tmm1",
                "tilestored [{c} + {stride}*1 + 2048], tmm2",
                "tilestored [{c} + {stride}*1 + 3072], tmm3",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                c = in(reg) c,
                step = in(reg) step,
                stride = in(reg) STRIDE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the value exists where the instructions do.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// The instructions as the manual describes them, for machines that lack them.
#[cfg(test)]
pub(super) struct Emulated {
    config: Config,
    tiles: [[[u8; STRIDE]; TILE]; 8],
}

#[cfg(test)]
impl Emulated {
    /// Rows of a register, and bytes of each.
    fn shape(&self, tile: usize) -> (usize, usize) {
        (usize::from(self.config.0[48 + tile]), usize::from(self.config.0[16 + 2 * tile]))
    }

    fn zero(&mut self, tile: usize) {
        self.tiles[tile] = [[0; STRIDE]; TILE];
    }

    /// # Safety
    /// `p` is good for the register's rows.
    unsafe fn load(&mut self, tile: usize, p: *const u8, stride: usize) {
        self.zero(tile);
        let (rows, bytes) = self.shape(tile);
        for m in 0..rows {
            // SAFETY: the caller's promise.
            let row = unsafe { std::slice::from_raw_parts(p.add(m * stride), bytes) };
            self.tiles[tile][m][..bytes].copy_from_slice(row);
        }
    }

    /// # Safety
    /// As [`Emulated::load`].
    unsafe fn store(&self, tile: usize, p: *mut u8, stride: usize) {
        let (rows, bytes) = self.shape(tile);
        for m in 0..rows {
            // SAFETY: the caller's promise.
            unsafe { p.add(m * stride).copy_from_nonoverlapping(self.tiles[tile][m].as_ptr(), bytes) };
        }
    }

    fn word(&self, tile: usize, row: usize, i: usize) -> [u8; 4] {
        std::array::from_fn(|j| self.tiles[tile][row][4 * i + j])
    }

    /// `tdpbssd`
    fn dot(&mut self, c: usize, a: usize, b: usize) {
        let (rows, bytes) = self.shape(c);
        let (words, columns) = self.shape(b);
        assert_eq!((self.shape(a), columns), ((rows, 4 * words), bytes), "shapes of A, B and C");
        for m in 0..rows {
            for n in 0..bytes / 4 {
                let mut sum = i32::from_le_bytes(self.word(c, m, n));
                for k in 0..words {
                    let pairs = self.word(a, m, k).into_iter().zip(self.word(b, k, n));
                    sum += pairs.map(|(x, y)| i32::from(x as i8) * i32::from(y as i8)).sum::<i32>();
                }
                self.tiles[c][m][4 * n..4 * n + 4].copy_from_slice(&sum.to_le_bytes());
            }
        }
    }

    /// The product in the registers of number `i`.
    ///
    /// # Safety
    /// As [`Tiles::product`].
    unsafe fn in_registers(&mut self, i: usize, a: *const u8, b: *const u8, c: *mut i32) {
        self.zero(C[i]);
        // SAFETY: the caller's promise.
        unsafe {
            self.load(A[i % 2], a, STRIDE);
            self.load(B[i % 2], b, STRIDE);
            self.dot(C[i], A[i % 2], B[i % 2]);
            self.store(C[i], c.cast(), STRIDE);
        }
    }
}

#[cfg(test)]
impl Tiles for Emulated {
    unsafe fn new(words: usize) -> Self {
        Self { config: Config::new(words), tiles: [[[0xA5; STRIDE]; TILE]; 8] }
    }

    unsafe fn product(&mut self, a: *const u8, b: *const u8, c: *mut i32) {
        // SAFETY: the caller's promise.
        unsafe { self.in_registers(0, a, b, c) }
    }

    unsafe fn long_product(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize) {
        self.zero(C[0]);
        // SAFETY: the caller's promise.
        unsafe {
            for i in 0..2 {
                self.load(A[i], a.add(i * step), STRIDE);
                self.load(B[i], b.add(i * step), STRIDE);
                self.dot(C[0], A[i], B[i]);
            }
            self.store(C[0], c.cast(), STRIDE);
        }
    }

    unsafe fn products(&mut self, a: *const u8, b: *const u8, c: *mut i32, step: usize) {
        for i in 0..AT_ONCE {
            // SAFETY: the caller's promise.
            unsafe { self.in_registers(i, a.add(i * step), b.add(i * step), c.add(i * TILE * TILE)) }
        }
    }
}
