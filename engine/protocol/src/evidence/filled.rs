//! Files whose size is set before their bytes are written.
//!
//! Owns: how far the bytes of such a file are believed. Does not own: which formats allow this (`tidemark-content`), the control file that
//! a downloader keeps beside a file that it fills (`recognise`).

use crate::visibility::Content;

/// Lowers a verdict on content to what can be believed. Some formats let a writer set a file's size first and fill it in any order
/// (`in_advance`). If the writer of such a file did not close it (`cut`), bytes that look whole may be zeros.
#[must_use]
pub fn believed(says: Content, in_advance: bool, cut: bool) -> Content {
    match says {
        Content::Whole if in_advance && cut => Content::Unknown,
        says => says,
    }
}
