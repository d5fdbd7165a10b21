//! What the backend of cards promises, on its kernels themselves: on a card, or without one in a process that finds the emulated
//! driver and compiler (`tools/cuda-emulator`), lane by lane on the host.
//!
//! `cargo test -p doyen --test cuda_emulated` needs g++ and Python; with a card, `-- --ignored --skip emulated` runs the same tests on it.

#![cfg(all(feature = "cuda", target_os = "linux", target_arch = "x86_64"))]

#[allow(dead_code, reason = "shared with tests that use more of it")]
#[path = "../common/mod.rs"]
mod common;
mod company;
mod emulated;
mod memory;
#[path = "../common/nan.rs"]
mod nan;
mod unseen;

use doyen::device::{DeviceArgs, DeviceName, FloatName, KvName};
use doyen_graph::device::{Device, Numerics};

/// A card that multiplies in `compute` and holds keys and values in `kv`.
fn card(compute: FloatName, kv: KvName) -> Box<dyn Device> {
    let args = DeviceArgs {
        device: DeviceName::Cuda(0),
        compute_dtype: Some(compute),
        kv_dtype: Some(kv),
        ..DeviceArgs::default()
    };
    args.open(None, Numerics::Fast).expect("there is a card").device
}

#[test]
#[ignore = "needs a card; `all_on_an_emulated_card` runs it on an emulated one"]
fn queries_that_see_a_nan_become_nan() {
    nan::queries_that_see_a_nan_become_nan(|| card(FloatName::F32, KvName::F32), true);
    nan::queries_that_see_a_nan_become_nan(|| card(FloatName::F32, KvName::Int8), false);
}

#[test]
#[ignore = "needs a card; `all_on_an_emulated_card` runs it on an emulated one"]
fn later_steps_remember_a_nan_until_the_row_is_written_again() {
    for (kv, bits) in [(KvName::F32, 8), (KvName::F32, 4), (KvName::F32, 0), (KvName::Int8, 0)] {
        nan::later_steps_remember_until_the_row_is_written_again(card(FloatName::F32, kv).as_ref(), bits);
    }
}
