//! Predicts a file's size from the last file of its name.
//!
//! Owns: the remembered sizes. Does not own: the memory prepared for a predicted size (Tier-1).
//!
//! Checkpoints repeat: `step100/__0_0.distcp` is as large as `step50/__0_0.distcp` was. Digits are masked, so that one
//! entry stands for all steps of a name.

use std::collections::HashMap;
use std::sync::Mutex;

/// Maximum number of remembered names; beyond it all are forgotten and learnt again. A large job has some thousand.
const NAMES_MAX: usize = 65_536;

/// Sizes by masked path.
#[derive(Debug, Default)]
pub struct Sizes {
    by_name: Mutex<HashMap<Vec<u8>, u64>>,
}

impl Sizes {
    /// Returns the size of the last file of this name, in bytes; `None` for a new name.
    #[must_use]
    pub fn predict(&self, path: &[u8]) -> Option<u64> {
        self.by_name.lock().expect("nothing panics while it holds the sizes").get(&masked(path)).copied()
    }

    /// Records the size of a closed file.
    pub fn learn(&self, path: &[u8], size_bytes: u64) {
        let mut by_name = self.by_name.lock().expect("nothing panics while it holds the sizes");
        if by_name.len() >= NAMES_MAX {
            by_name.clear();
        }
        by_name.insert(masked(path), size_bytes);
    }
}

/// Returns the path with each run of digits as one `#`.
fn masked(path: &[u8]) -> Vec<u8> {
    let mut name = Vec::with_capacity(path.len());
    for &byte in path {
        if !byte.is_ascii_digit() {
            name.push(byte);
        } else if name.last() != Some(&b'#') {
            name.push(b'#');
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_is_as_large_as_the_last() {
        let sizes = Sizes::default();
        assert_eq!(sizes.predict(b"r/step-9/__0_0.distcp"), None);
        sizes.learn(b"r/step-9/__0_0.distcp", 7);
        assert_eq!(sizes.predict(b"r/step-10/__0_0.distcp"), Some(7));
        assert_eq!(sizes.predict(b"r/step-10/.metadata"), None);
        sizes.learn(b"r/step-10/__0_0.distcp", 8);
        assert_eq!(sizes.predict(b"r/step-11/__0_0.distcp"), Some(8));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let sizes = Sizes::default();
        for letter in 0..=NAMES_MAX {
            let name: Vec<u8> =
                format!("{letter:x}").bytes().map(|b| if b.is_ascii_digit() { b + 60 } else { b }).collect();
            sizes.learn(&name, 1);
        }
        assert!(sizes.by_name.lock().unwrap().len() <= NAMES_MAX);
    }
}
