//! A checkpoint that needs no framework: safetensors shards with an index, whose bytes follow from a seed.
//!
//! Owns: writing a checkpoint and reading it back. Does not own: the moment at which the daemon dies meanwhile, so both
//! functions return errors.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Number of shards, more than one, so that an attempt can stop between two of them.
const SHARDS: usize = 3;
/// Sizes of the shards, all odd. The last shard has more than one 8 MiB chunk.
const SHARD_BYTES: [usize; SHARDS] = [1_000_003, 65_537, 9_437_185];

/// The names and bytes of one checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// The directory, relative to the mount.
    pub(crate) path: String,
    files: Vec<(String, Vec<u8>)>,
}

/// The state in which a checkpoint was read back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Whole,
    Absent,
    /// Some files are there, and each readable one holds the right bytes.
    Part(Vec<String>),
}

impl Checkpoint {
    pub(crate) fn new(run: &str, step: u64) -> Self {
        let mut files = vec![];
        let mut weight_map = serde_json::Map::new();
        for (number, size_bytes) in SHARD_BYTES.into_iter().enumerate() {
            let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", number + 1);
            let tensor = format!("layer.{number}.weight");
            files.push((name.clone(), safetensors(&tensor, &noise(step * 31 + number as u64, size_bytes))));
            weight_map.insert(tensor, Value::from(name));
        }
        let total: usize = SHARD_BYTES.iter().sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        // The framework writes the index last, and the index is the evidence that all files are there.
        files.push(("model.safetensors.index.json".into(), index.to_string().into_bytes()));
        Self { path: format!("{run}/checkpoint-{step}"), files }
    }

    /// Writes every file, in the framework's order. Returns the error that a job sees when the daemon dies.
    pub(crate) fn save(&self, mount: &Path) -> io::Result<()> {
        let folder = mount.join(&self.path);
        std::fs::create_dir_all(&folder)?;
        self.files.iter().try_for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes))
    }

    /// Reads all files that are there. Panics at the first byte that differs from the save, which nothing excuses.
    pub(crate) fn look(&self, mount: &Path) -> Found {
        let folder = mount.join(&self.path);
        let mut right = vec![];
        for (name, bytes) in &self.files {
            match std::fs::read(folder.join(name)) {
                Ok(read) => {
                    assert!(
                        read == *bytes,
                        "{}/{name}: {} bytes were saved, {} other ones are served",
                        self.path,
                        bytes.len(),
                        read.len()
                    );
                    right.push(name.clone());
                }
                // A file that is not committed may be absent or reported as lost.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::EIO) => {
                }
                Err(error) => panic!("{}/{name}: {error}", self.path),
            }
        }
        match right.len() {
            0 => Found::Absent,
            n if n == self.files.len() => Found::Whole,
            _ => Found::Part(right),
        }
    }

    /// Returns the files' paths below the mount.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|(name, _)| Path::new(&self.path).join(name)).collect()
    }
}

/// Returns a tensor of bytes in the safetensors format: header length, header, data.
fn safetensors(tensor: &str, data: &[u8]) -> Vec<u8> {
    let header =
        json!({tensor: {"dtype": "U8", "shape": [data.len()], "data_offsets": [0, data.len()]}}).to_string();
    let length = (header.len() as u64).to_le_bytes();
    [length.as_slice(), header.as_bytes(), data].concat()
}

/// Returns bytes that no other seed gives, and that do not compress, from a xorshift generator.
fn noise(seed: u64, size_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(size_bytes + 8);
    while bytes.len() < size_bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size_bytes);
    bytes
}

#[test]
fn a_checkpoint_is_found_whole_in_part_and_absent() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new("run", 5);
    assert_eq!(checkpoint.look(dir.path()), Found::Absent);
    checkpoint.save(dir.path()).unwrap();
    assert_eq!(checkpoint.look(dir.path()), Found::Whole);
    std::fs::remove_file(dir.path().join(&checkpoint.paths()[1])).unwrap();
    assert!(matches!(checkpoint.look(dir.path()), Found::Part(names) if names.len() == SHARDS));
}

#[test]
#[should_panic(expected = "other ones are served")]
fn one_wrong_byte_is_never_excused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new("run", 5);
    checkpoint.save(dir.path()).unwrap();
    let path = dir.path().join(&checkpoint.paths()[0]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[500] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    checkpoint.look(dir.path());
}
