//! Files whose size is set before their bytes come.
//!
//! Owns: how far the bytes of such a file are believed. Does not own: which formats are such (`tidemark-content`), what a downloader keeps
//! beside a file that it fills (`recognise`).

use crate::visibility::Content;

/// What bytes say of themselves whose size their format lets a writer set first, and fill afterwards in any order (`in_advance`).
/// Where its writer did not close it (`cut`), what looks whole may be zeros.
#[must_use]
pub fn believed(says: Content, in_advance: bool, cut: bool) -> Content {
    match says {
        Content::Whole if in_advance && cut => Content::Unknown,
        says => says,
    }
}
