//! The graph as exported: SSA values, nodes with parsed operators, constants as views.
//!
//! Built by `onnx::decode` and by the converter; read by the passes and the reference interpreter. Shapes may
//! be symbolic. A node whose operator is not known is kept (so that `show` can list it) and refused by the
//! checker.

mod attrs;
mod constant;
mod dim;
mod graph;

pub use attrs::{Attr, Attrs};
pub use constant::{Constant, Part};
pub use dim::{Dim, Fact};
pub use graph::{Graph, GraphError, Node, NodeId, Value, ValueId};
