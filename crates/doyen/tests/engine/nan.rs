//! NaN on its way through the CPU's caches.

#[path = "../common/nan.rs"]
mod checks;

use crate::common::device;

#[test]
fn queries_that_see_a_nan_become_nan() {
    checks::queries_that_see_a_nan_become_nan(|| Box::new(device(2)), true);
}

#[test]
fn later_steps_remember_until_the_row_is_written_again() {
    for bits in [8, 4, 0] {
        checks::later_steps_remember_until_the_row_is_written_again(&device(1), bits);
    }
}
