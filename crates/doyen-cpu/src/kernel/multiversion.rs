//! Compiling one body for every instruction set.
//!
//! A body is a generic `#[inline(always)]` function over `const FMA: bool`, written so that the compiler vectorises
//! it: fixed-width accumulators, no branches on data. The macro wraps it in one function per instruction set and in a
//! function that picks among them when a kernel is bound.

/// `pub fn name(isa: Isa) -> fn(args) -> ret`, out of `body::<FMA>(args) -> ret`.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::detect::Isa) -> fn($($ty),*) $(-> $ret)? {
            fn scalar($($arg: $ty),*) $(-> $ret)? {
                $body::<false>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn inner($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                // SAFETY: this function is handed out below only, in exchange for the proof of these features.
                unsafe { inner($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            if isa.avx2().is_some() {
                return avx2;
            }
            let _ = isa;
            scalar
        }
    };
}

pub(crate) use multiversion;
