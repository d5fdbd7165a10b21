//! The functions that the kernels of an instruction set begin with: where its features are enabled.

/// Rows of activations that go through `stream`; more meet staged tiles.
pub(super) const STREAMED: usize = 4;

/// `kernel`, out of the functions for both modes: in terms of `BITS` and, with int8 activations, `UNIT`, or `FLOAT_UNIT`.
macro_rules! kernels {
    ($name:literal, $fast:expr, $exact:expr) => {
        /// The kernel of a width and of the groups that blocks are cut into.
        pub(in crate::kernel::linear::int) fn kernel(bits: Bits, unit: Unit, mode: Mode) -> Kernel {
            match (bits, unit) {
                (Bits::B2, Unit::C16) => of_mode::<2, 16, 16>(mode, concat!($name, "-int2-b16")),
                (Bits::B2, Unit::C32) => of_mode::<2, 32, 32>(mode, concat!($name, "-int2")),
                (Bits::B2, Unit::C128) => of_mode::<2, 128, 32>(mode, concat!($name, "-int2-b128")),
                (Bits::B4, Unit::C16) => of_mode::<4, 16, 16>(mode, concat!($name, "-int4-b16")),
                (Bits::B4, Unit::C32) => of_mode::<4, 32, 32>(mode, concat!($name, "-int4")),
                (Bits::B4, Unit::C128) => of_mode::<4, 128, 32>(mode, concat!($name, "-int4-b128")),
                (Bits::B8, Unit::C16) => of_mode::<8, 16, 16>(mode, concat!($name, "-int8-b16")),
                (Bits::B8, Unit::C32) => of_mode::<8, 32, 32>(mode, concat!($name, "-int8")),
                (Bits::B8, Unit::C128) => of_mode::<8, 128, 32>(mode, concat!($name, "-int8-b128")),
            }
        }

        fn of_mode<const BITS: usize, const UNIT: usize, const FLOAT_UNIT: usize>(
            mode: Mode,
            name: &'static str,
        ) -> Kernel {
            match mode {
                Mode::Fast | Mode::Wide | Mode::Fine => Kernel::int(name, mode, $fast),
                Mode::Exact => Kernel::int(name, mode, $exact),
            }
        }
    };
}

/// `kernel` of an x86 instruction set, and the functions it hands out: `entries!(name, features, ByteLanes, FloatLanes, Spans)`.
///
/// Whoever gets a kernel has proved the features by holding an `Isa` with their token; that, and what the caller of a kernel has
/// checked, is what every `// SAFETY:` line here refers to.
#[cfg(target_arch = "x86_64")]
macro_rules! entries {
    ($name:literal, $features:literal, $bytes:ty, $floats:ty, $spans:ty) => {
        use doyen_tensor::{
            FloatType, FloatView,
            format::{Bits, QuantMatrix, ZeroPoints},
        };
        use $crate::kernel::{
            linear::{
                Columns, Kernel, LANES, Mode,
                int::{
                    Unit,
                    entries::STREAMED,
                    exact, fast,
                    stream::{self, ANY, DEFAULT, OTHER, PACKED},
                    stream_float::Floats,
                    stream_ints,
                },
            },
            quantize::Prepared,
        };

        $crate::kernel::linear::int::entries::kernels!(
            $name,
            fast_rows::<BITS, UNIT>,
            exact_rows::<BITS, FLOAT_UNIT>
        );

        /// # Safety
        /// The features are there; the matrix is valid, of `BITS` and units of `UNIT`.
        pub(in crate::kernel::linear::int) unsafe fn fast_rows<const BITS: usize, const UNIT: usize>(
            w: &QuantMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match acts.rows() {
                    0 => {}
                    1 => streamed::<BITS, UNIT, 1>(w, acts, bias, out),
                    2 => streamed::<BITS, UNIT, 2>(w, acts, bias, out),
                    3 => streamed::<BITS, UNIT, 3>(w, acts, bias, out),
                    STREAMED => streamed::<BITS, UNIT, STREAMED>(w, acts, bias, out),
                    _ => staged_rows::<BITS, UNIT>(w, acts, bias, out),
                }
            }
        }

        /// # Safety
        /// As `fast_rows`; there are `T` rows of activations.
        unsafe fn streamed<const BITS: usize, const UNIT: usize, const T: usize>(
            w: &QuantMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise; the numbers are those of `Job::float_type` and of `stream::DEFAULT`.
            unsafe {
                match (w.scales.float_type(), w.zero_points) {
                    _ if UNIT > 32 => stream_rows::<BITS, UNIT, T, ANY, ANY>(w, acts, bias, out),
                    (FloatType::F32, ZeroPoints::Default) => {
                        stream_rows::<BITS, UNIT, T, 0, DEFAULT>(w, acts, bias, out)
                    }
                    (FloatType::F16, ZeroPoints::Default) => {
                        stream_rows::<BITS, UNIT, T, 1, DEFAULT>(w, acts, bias, out)
                    }
                    (FloatType::BF16, ZeroPoints::Default) => {
                        stream_rows::<BITS, UNIT, T, 2, DEFAULT>(w, acts, bias, out)
                    }
                    (FloatType::F32, ZeroPoints::PerBlock { .. }) => {
                        stream_rows::<BITS, UNIT, T, 0, PACKED>(w, acts, bias, out)
                    }
                    (FloatType::F16, ZeroPoints::PerBlock { .. }) => {
                        stream_rows::<BITS, UNIT, T, 1, PACKED>(w, acts, bias, out)
                    }
                    (FloatType::BF16, ZeroPoints::PerBlock { .. }) => {
                        stream_rows::<BITS, UNIT, T, 2, PACKED>(w, acts, bias, out)
                    }
                    (FloatType::F32, _) => stream_rows::<BITS, UNIT, T, 0, OTHER>(w, acts, bias, out),
                    (FloatType::F16, _) => stream_rows::<BITS, UNIT, T, 1, OTHER>(w, acts, bias, out),
                    (FloatType::BF16, _) => stream_rows::<BITS, UNIT, T, 2, OTHER>(w, acts, bias, out),
                }
            }
        }

        /// # Safety
        /// As `streamed`; scales and zero points are as `TY` and `ZEROS` say.
        #[target_feature(enable = $features)]
        unsafe fn stream_rows<
            const BITS: usize,
            const UNIT: usize,
            const T: usize,
            const TY: u8,
            const ZEROS: u8,
        >(
            w: &QuantMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe { stream_ints::rows::<$spans, BITS, UNIT, T, TY, ZEROS>(w, acts, bias, out) }
        }

        /// # Safety
        /// As `fast_rows`.
        #[target_feature(enable = $features)]
        unsafe fn staged_rows<const BITS: usize, const UNIT: usize>(
            w: &QuantMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe { fast::rows::<$bytes, BITS, UNIT>(w, acts, bias, out) }
        }

        /// # Safety
        /// As `fast_rows`.
        #[target_feature(enable = $features)]
        pub(in crate::kernel::linear::int) unsafe fn exact_rows<const BITS: usize, const UNIT: usize>(
            w: &QuantMatrix<'_>,
            acts: &Prepared<'_>,
            bias: Option<FloatView<'_>>,
            out: &mut Columns<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                match acts.rows() {
                    0 => {}
                    // Lanes of an octet would idle.
                    _ if w.cols < LANES * UNIT => exact::rows::<$floats, BITS, UNIT>(w, acts, bias, out),
                    1 => stream::rows::<Floats, BITS, UNIT, 1, ANY, ANY>(w, acts, bias, out),
                    2 => stream::rows::<Floats, BITS, UNIT, 2, ANY, ANY>(w, acts, bias, out),
                    3 => stream::rows::<Floats, BITS, UNIT, 3, ANY, ANY>(w, acts, bias, out),
                    STREAMED => stream::rows::<Floats, BITS, UNIT, STREAMED, ANY, ANY>(w, acts, bias, out),
                    _ => exact::rows::<$floats, BITS, UNIT>(w, acts, bias, out),
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use entries;
pub(super) use kernels;
