//! The order in which host copies give way.
//!
//! Owns: the classes of reclaiming, and the class that a version gives its files. Does not own: which version is the
//! newest (`lineage`), finding room (the engine's namespace, which evicts a copy only if Tier-3 has the same seal).

use crate::key::VersionId;

/// The class in which a file's host copy may be reclaimed under pressure: lower classes first, the longest closed first
/// within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ReclaimClass {
    /// File of a committed version, while a newer one of its lineage is committed too.
    BelowWatermark,
    /// A loose file, uploaded and recorded.
    Loose,
    /// File of the newest committed version: reclaimed last, and only under pressure.
    CommittedNewest,
    /// Not in Tier-3: these bytes may be the only ones.
    #[default]
    Never,
}

/// Returns the class of the files of a committed version. A file of several versions has the highest of theirs.
#[must_use]
pub fn reclaim_class(committed: &VersionId, watermark: Option<&VersionId>) -> ReclaimClass {
    match watermark {
        Some(watermark) if watermark != committed => ReclaimClass::BelowWatermark,
        // Without a watermark it is not known that a newer version exists.
        Some(_) | None => ReclaimClass::CommittedNewest,
    }
}

/// Returns the class of a loose file that is uploaded and recorded, and whose class was `known` before. The file may be
/// another name of a checkpoint's file; then its class is not lowered.
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
