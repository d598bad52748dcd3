//! Which host copies give way, and in which order.
//!
//! Owns: the classes of reclaiming, and which version puts a file into which. Does not own: which version is the
//! newest (`lineage`), finding room (the engine's namespace, which takes a copy only where Tier-3 has the same seal).

use crate::key::VersionId;

/// What may be taken of a file's host copy under pressure: lower classes first, the longest closed first within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ReclaimClass {
    /// Of a committed version, and a newer one of its lineage is committed too.
    BelowWatermark,
    /// A loose file, uploaded and recorded.
    Loose,
    /// Of the newest committed version: taken last, and only under pressure.
    CommittedNewest,
    /// Not in Tier-3: these may be the only bytes.
    #[default]
    Never,
}

/// The class of the files of a committed version. A file of several versions has the highest of theirs.
#[must_use]
pub fn reclaim_class(committed: &VersionId, watermark: Option<&VersionId>) -> ReclaimClass {
    match watermark {
        Some(watermark) if watermark != committed => ReclaimClass::BelowWatermark,
        // Without a watermark nothing says that a newer one is there.
        Some(_) | None => ReclaimClass::CommittedNewest,
    }
}

/// The class of a loose file that is uploaded and recorded, and was `known` before: it may be another name of a file of a
/// checkpoint, whose class it does not lower.
#[must_use]
pub fn loose_class(known: ReclaimClass) -> ReclaimClass {
    match known {
        ReclaimClass::Never => ReclaimClass::Loose,
        of_a_version => of_a_version.max(ReclaimClass::Loose),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Version;
    use crate::record::tests::version;

    #[test]
    fn the_newest_committed_gives_way_last_and_the_only_copy_never() {
        let older = version();
        let newest = VersionId { version: Version(2), ..version() };
        let below = reclaim_class(&older, Some(&newest));
        let last = reclaim_class(&newest, Some(&newest));
        assert_eq!(last, reclaim_class(&newest, None));
        assert_eq!(loose_class(ReclaimClass::Never), ReclaimClass::Loose);
        assert_eq!((loose_class(below), loose_class(last)), (ReclaimClass::Loose, last));
        assert!(below < ReclaimClass::Loose && ReclaimClass::Loose < last && last < ReclaimClass::default());
    }
}
