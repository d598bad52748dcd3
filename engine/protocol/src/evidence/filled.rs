//! Files whose size is set before their bytes come.
//!
//! Owns: how far the bytes of such a file are believed. Does not own: which formats are such (`tidemark-content`), what a downloader keeps
//! beside a file that it fills (`recognise`).

use super::Writer;
use crate::visibility::Content;

/// What bytes say of themselves whose size their format lets a writer set first, and fill afterwards in any order (`in_advance`).
/// Where it was killed or failed before the file had been quiet for the settle time, which ends at `quiet_at_ns`, what looks whole may
/// be zeros. `cut`: it did not close the file.
#[must_use]
pub fn believed(says: Content, in_advance: bool, cut: bool, writers: &[Writer], quiet_at_ns: i64) -> Content {
    let broken_off = cut || writers.iter().any(|writer| writer.failed_before(quiet_at_ns));
    match says {
        Content::Whole if in_advance && broken_off => Content::Unknown,
        says => says,
    }
}
