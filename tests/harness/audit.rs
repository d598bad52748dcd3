//! A bucket as an auditor sees it: objects by key, read as the format says and with nothing of the engine.
//!
//! Owns: following a marker to its manifest and on to every byte, and a sidecar to its file. Does not own: the source of
//! the objects, a directory (`tier3`).

use blake3::Hasher;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use serde_json::Value;
use std::collections::BTreeMap;

/// Objects by key, the store's prefix left out.
pub type Objects = BTreeMap<String, Bytes>;

/// Files that a standing marker makes readable: paths below the mount, with their bytes.
pub type Files = BTreeMap<String, Bytes>;

/// The content of a bucket's markers.
#[derive(Debug, Default)]
pub struct Found {
    /// The files of every version that is committed and not retired, by the version's key.
    pub committed: BTreeMap<String, Files>,
    /// Markers that are no documents. Such a marker decides nothing, but its version number counts as used.
    pub unreadable: Vec<String>,
}

/// Follows every marker to the files that it commits.
///
/// # Errors
/// Names the first marker, manifest or byte that does not verify. None may ever exist.
pub fn markers(objects: &Objects) -> Result<Found, String> {
    let mut found = Found::default();
    for (key, body) in objects {
        let Some(version) = key.strip_suffix("/_COMMITTED") else { continue };
        let Ok(marker) = json(key, body) else {
            found.unreadable.push(key.clone());
            continue;
        };
        match marker["decision"].as_str() {
            Some("abort") => continue,
            Some("commit") => {}
            other => return Err(format!("{key} decides {other:?}")),
        }
        if objects.contains_key(&format!("{version}/_RETIRED")) {
            continue;
        }
        found.committed.insert(version.to_owned(), files_of(objects, key, &marker)?);
    }
    Ok(found)
}

/// Returns the newest generation of every loose file that has a sidecar.
///
/// # Errors
/// Names the first sidecar or byte that does not verify.
pub fn loose(objects: &Objects) -> Result<Files, String> {
    let mut newest: BTreeMap<String, (u64, Bytes)> = BTreeMap::new();
    for (key, body) in objects {
        if !key.starts_with(".tidemark/loose/") || !key.ends_with(".json") {
            continue;
        }
        let sidecar = json(key, body)?;
        let generation = number(key, &sidecar["generation"])?;
        let (path, bytes) = file_of(objects, key, &sidecar)?;
        if newest.get(&path).is_none_or(|(known, _)| *known < generation) {
            newest.insert(path, (generation, bytes));
        }
    }
    Ok(newest.into_iter().map(|(path, (_, bytes))| (path, bytes)).collect())
}

fn files_of(objects: &Objects, marker_key: &str, marker: &Value) -> Result<Files, String> {
    let key = text(marker_key, &marker["manifest"])?;
    let hash = text(marker_key, &marker["manifest_hash"])?;
    let body = objects.get(key).ok_or_else(|| format!("{marker_key} names {key}, which is not there"))?;
    let found = Hasher::new().update(body).finalize().to_hex();
    if found.as_str() != hash || !key.ends_with(&format!("/manifest-{hash}.json")) {
        return Err(format!("{key} hashes to {found}, {marker_key} says {hash}"));
    }
    let manifest = json(key, body)?;
    let listed = manifest["files"].as_array().filter(|files| !files.is_empty());
    let listed = listed.ok_or_else(|| format!("{key} lists no file"))?;
    listed.iter().map(|entry| file_of(objects, key, entry)).collect()
}

/// Reads the file of an entry of a manifest or a sidecar: its path and bytes, with every checksum verified.
fn file_of(objects: &Objects, from: &str, entry: &Value) -> Result<(String, Bytes), String> {
    let (path, key) = (text(from, &entry["path"])?, text(from, &entry["key"])?);
    let bytes = objects.get(key).ok_or_else(|| format!("{from} names {key}, which is not there"))?;
    let expected = number(from, &entry["size_bytes"])?;
    if bytes.len() as u64 != expected {
        return Err(format!("{key} has {} bytes, {from} says {expected}", bytes.len()));
    }
    check(from, key, bytes, &entry["crc64nvme"])?;
    let chunks = entry["chunks"].as_array().ok_or_else(|| format!("{from} has no chunks of {key}"))?;
    let held = bytes.chunks(CHUNK_BYTES);
    if chunks.len() != held.len() {
        return Err(format!("{key} has {} chunks, {from} says {}", held.len(), chunks.len()));
    }
    held.zip(chunks).try_for_each(|(bytes, sum)| check(from, key, bytes, sum))?;
    Ok((path.to_owned(), bytes.clone()))
}

/// Chunk size of the format, repeated here so that the auditor uses nothing of the engine.
const CHUNK_BYTES: usize = 8 << 20;

fn check(from: &str, key: &str, bytes: &[u8], sum: &Value) -> Result<(), String> {
    let found = format!("{:016x}", checksum(CrcAlgorithm::Crc64Nvme, bytes));
    if sum.as_str() == Some(&found) {
        return Ok(());
    }
    Err(format!("{} bytes of {key} have the checksum {found}, {from} says {sum}", bytes.len()))
}

fn json(key: &str, body: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(body).map_err(|error| format!("{key} is no document: {error}"))
}

fn text<'a>(key: &str, value: &'a Value) -> Result<&'a str, String> {
    value.as_str().ok_or_else(|| format!("{key} has {value} where a text belongs"))
}

fn number(key: &str, value: &Value) -> Result<u64, String> {
    value.as_u64().ok_or_else(|| format!("{key} has {value} where a number belongs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a bucket with one version of one file, as the format says.
    fn bucket() -> Objects {
        let data = Bytes::from_static(b"123456789");
        let key = "r/s.pt/v0.1/a-1/s.pt";
        let manifest = format!(
            r#"{{"files":[{{"path":"r/s.pt","key":"{key}","size_bytes":9,"crc64nvme":"ae8b14860a799888","chunks":["ae8b14860a799888"]}}]}}"#
        );
        let hash = blake3::hash(manifest.as_bytes()).to_hex();
        let named = format!("r/s.pt/v0.1/a-1/.tidemark/manifest-{hash}.json");
        let marker = format!(r#"{{"decision":"commit","manifest":"{named}","manifest_hash":"{hash}"}}"#);
        [(key.to_owned(), data), (named, manifest.into()), ("r/s.pt/v0.1/_COMMITTED".into(), marker.into())]
            .into()
    }

    #[test]
    fn a_marker_leads_to_every_byte_or_to_what_is_wrong() {
        let whole = bucket();
        let found = markers(&whole).unwrap();
        assert_eq!(found.committed["r/s.pt/v0.1"]["r/s.pt"], "123456789");
        for key in whole.keys().filter(|key| !key.ends_with("_COMMITTED")) {
            let mut less = whole.clone();
            less.remove(key);
            assert!(markers(&less).unwrap_err().contains("not there"), "{key}");
            let mut damaged = whole.clone();
            damaged.insert(key.clone(), Bytes::from_static(b"123456780"));
            markers(&damaged).expect_err(key);
        }
        let mut retired = whole;
        retired.insert("r/s.pt/v0.1/_RETIRED".into(), Bytes::new());
        retired.insert("r/s.pt/v0.2/_COMMITTED".into(), Bytes::from_static(b"zz"));
        let found = markers(&retired).unwrap();
        assert!(found.committed.is_empty());
        assert_eq!(found.unreadable, ["r/s.pt/v0.2/_COMMITTED"]);
    }
}
