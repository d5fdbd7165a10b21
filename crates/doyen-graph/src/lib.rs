//! Graphs of language models in ONNX form: from the bytes of a package to a lowered graph a device can run.
//!
//! | module | what lives there |
//! |---|---|
//! | [`ir`] | the graph as exported: values, nodes, constants as views, symbolic dimensions |
//! | [`ops`] | one file per operator: attributes, load-time check and shape rule, scalar reference, token-axis rule |
//! | [`onnx`] | reading and writing ONNX files |
//! | [`pass`] | rewrites: constant folding, dead code, lowering |
//! | [`check`] | topological order, shape inference, every reason a graph cannot run |
//! | [`interp`] | the reference interpreter, judge of every backend |
//! | [`lowered`] | the stateful graph over ragged tokens that devices run |
//! | [`naive`] | a lowered graph run in the plainest way: the judge of backends |
//! | [`device`] | the traits a backend implements, and the planned program it is given |
//! | [`package`] | package files, mapped: manifest, ports, tokenizer files |
//! | [`testkit`] | the conformance runner |
//!
//! Data goes one way: `onnx` decodes, `ir` is checked and folded, `pass` lowers, a device runs. Nothing here
//! knows a model architecture; a graph is what its operators say.

#![deny(unsafe_code)]

pub mod check;
pub mod device;
pub mod interp;
pub mod ir;
pub mod lowered;
pub mod naive;
pub mod onnx;
pub mod ops;
pub mod package;
pub mod pass;
pub mod testkit;
