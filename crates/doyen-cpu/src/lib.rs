//! CPU kernels, the pool they run on, and the choice of instruction set.
//!
//! * [`pool`]: a pinned fork-join pool; nothing is allocated per parallel region, and no lock taken while threads are awake.
//! * [`detect`]: the instruction sets kernels are written for, found once.
//! * [`kernel`]: the kernels, one folder or file per operation. They know no graph: they take slices, views and
//!   plain parameters, write where they are told to and allocate nothing.
//! * [`mod@bench`]: measuring kernels beside a plain read loop.
//! * [`machine`]: what the operating system says of this machine.
//! * `bind`: from a lowered node to its kernel, once, at load.
//! * `session`: [`CpuDevice`] and the memory of a loaded program.

pub mod bench;
mod bind;
pub mod detect;
pub mod kernel;
pub mod machine;
pub mod pool;
mod session;

pub use session::CpuDevice;
