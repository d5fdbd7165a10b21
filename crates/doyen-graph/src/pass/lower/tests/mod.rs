//! Lowered decoders against the interpreter on the exported graph: the same tokens must give the same logits.

mod build;
mod cases;
mod equal;
mod goldens;
mod random;
mod refuse;
mod sdpa;
mod written;
mod written_attention;
