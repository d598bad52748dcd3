//! The list of hashes that Megatron-LM can write: which files a checkpoint needs.
//!
//! Owns: reading the names in `integrity.json`, bounded. Does not own: the hashes (ours are taken from the bytes as they
//! were written), the verdict (`super`). Format: megatron/core/dist_checkpointing/integrity.py,
//! `{"algorithm": "sha256", "files": {"<name>": "<hex>"}}`, every file of the directory but itself.

use super::index::{Covered, IndexError, NamedFiles};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

/// # Errors
/// When the bytes are no such list, or name a file outside their directory.
pub(super) fn parse(bytes: &[u8]) -> Result<Covered, IndexError> {
    #[derive(Deserialize)]
    struct Integrity {
        files: Files,
    }
    let integrity: Integrity = serde_json::from_slice(bytes).map_err(|source| IndexError::Json { source })?;
    integrity.files.0.into_covered()
}

struct Files(NamedFiles);

impl<'de> Deserialize<'de> for Files {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'de> Visitor<'de> for Names {
            type Value = Files;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map from files to their hashes")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Files, A::Error> {
                let mut files = NamedFiles::default();
                while let Some((Name(file), _)) = map.next_entry::<Name<'_>, IgnoredAny>()? {
                    files.note(&file);
                }
                Ok(Files(files))
            }
        }

        deserializer.deserialize_map(Names)
    }
}

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

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
