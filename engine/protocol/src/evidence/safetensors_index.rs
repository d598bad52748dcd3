//! The index of sharded safetensors: which files a checkpoint needs.
//!
//! Owns: reading `weight_map`, bounded. Does not own: the tensors, the verdict (`super`).
//! Format: the `*.safetensors.index.json` of Hugging Face, `{"weight_map": {"<tensor>": "<file>"}}`.

use super::{Covered, IndexError, covered};
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// # Errors
/// When the bytes are no such index, or name a file outside their directory.
pub(super) fn parse(bytes: &[u8]) -> Result<Covered, IndexError> {
    #[derive(Deserialize)]
    struct Index<'a> {
        #[serde(borrow)]
        weight_map: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
    }
    let index: Index<'_> = serde_json::from_slice(bytes).map_err(|source| IndexError::Json { source })?;
    covered(index.weight_map.values().map(Cow::as_ref))
}

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
