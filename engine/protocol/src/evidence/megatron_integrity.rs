//! The list of hashes that Megatron-LM can write: which files a checkpoint needs.
//!
//! Owns: reading the names in `integrity.json`, bounded. Does not own: the hashes (ours are taken from the bytes as they
//! were written), the verdict (`super`). Format: megatron/core/dist_checkpointing/integrity.py,
//! `{"algorithm": "sha256", "files": {"<name>": "<hex>"}}`, every file of the directory but itself.

use super::{Covered, IndexError, covered};
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// # Errors
/// When the bytes are no such list, or name a file outside their directory.
pub(super) fn parse(bytes: &[u8]) -> Result<Covered, IndexError> {
    #[derive(Deserialize)]
    struct Integrity<'a> {
        #[serde(borrow)]
        files: BTreeMap<Cow<'a, str>, serde::de::IgnoredAny>,
    }
    let integrity: Integrity<'_> =
        serde_json::from_slice(bytes).map_err(|source| IndexError::Json { source })?;
    covered(integrity.files.keys().map(Cow::as_ref))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_named_and_nothing_else_is_believed() {
        let text = br#"{"algorithm":"sha256","files":{".metadata":"00","__0_0.distcp":"11"}}"#;
        let names: Vec<_> = parse(text).unwrap().into_keys().map(|path| path.to_string()).collect();
        assert_eq!(names, [".metadata", "__0_0.distcp"]);
        for bad in [&b""[..], b"{}", b"{\"files\":{}}", b"{\"files\":{\"../x\":\"0\"}}", b"{\"files\":[]}"] {
            assert!(parse(bad).is_err());
        }
    }
}
