//! The index of sharded safetensors: the files that a checkpoint needs.
//!
//! Owns: reading `weight_map`, bounded. Does not own: the tensors, the verdict (`super`).
//! Format: the `*.safetensors.index.json` of Hugging Face, `{"weight_map": {"<tensor>": "<file>"}}`.

use super::index::{Covered, IndexError, NamedFiles};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

/// # Errors
/// When the bytes are no such index, or name a file outside their directory.
pub(super) fn parse(bytes: &[u8]) -> Result<Covered, IndexError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    let index: Index = serde_json::from_slice(bytes).map_err(|source| IndexError::Json { source })?;
    index.weight_map.0.into_covered()
}

/// The map's values, each kept once: there are far more tensors than files.
struct WeightMap(NamedFiles);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Files;

        impl<'de> Visitor<'de> for Files {
            type Value = WeightMap;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map from tensors to files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut files = NamedFiles::default();
                while let Some((_, Name(file))) = map.next_entry::<IgnoredAny, Name<'_>>()? {
                    files.note(&file);
                }
                Ok(WeightMap(files))
            }
        }

        deserializer.deserialize_map(Files)
    }
}

#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_named_once() {
        let text = br#"{"metadata":{},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-1.safetensors"}}"#;
        let names: Vec<_> = parse(text).unwrap().into_keys().map(|path| path.to_string()).collect();
        assert_eq!(names, ["m-1.safetensors", "m-2.safetensors"]);
    }

    #[test]
    fn an_index_that_means_nothing_is_refused() {
        for bad in [
            &b""[..],
            b"{}",
            b"{\"weight_map\":{}}",
            b"{\"weight_map\":{\"a\":\"../x\"}}",
            b"{\"weight_map\":3}",
        ] {
            assert!(parse(bad).is_err());
        }
    }
}
