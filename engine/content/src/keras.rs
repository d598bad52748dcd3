//! `.keras`: an archive of a configuration, metadata, and the weights as HDF5.
//!
//! Owns: the members that must exist. Does not own: the archive (`zip`), the weights (`hdf5`).
//! Source: `keras/src/saving/saving_lib.py` of Keras 3. Layers that were not written leave no trace.

use crate::Read;
use crate::source::{Source, Stop};
use crate::zip::Directory;
use crate::{hdf5, zip};

const METADATA: &[u8] = b"metadata.json";
const CONFIGURATION: &[u8] = b"config.json";
const WEIGHTS: &[u8] = b"model.weights.h5";
/// Prefix of other forms of the weights: npz, and several files with a list.
const OTHER_WEIGHTS: &[u8] = b"model.weights";
/// Maximum number of bytes of metadata that are read; Keras writes some hundred.
const MAX_METADATA_BYTES: usize = 16 << 10;

/// Whether an archive whose first member has this name may be a model of Keras.
pub(crate) fn is_member(name: &[u8]) -> bool {
    [METADATA, CONFIGURATION, WEIGHTS].contains(&name)
}

pub(crate) fn read(source: &mut Source<'_>, directory: Directory) -> Read {
    let (mut is_keras, mut configured, mut other) = (false, false, false);
    let mut weights = None;
    zip::members(source, directory, &mut |source, name, member| {
        if name == METADATA && member.is_plain() {
            let mut text = [0; MAX_METADATA_BYTES];
            let length = usize::try_from(member.size_bytes).ok();
            if let Some(text) = length.and_then(|length| text.get_mut(..length)) {
                source.read(member.at, text)?;
                is_keras = text.windows(15).any(|part| part == b"\"keras_version\"");
            }
        }
        configured |= name == CONFIGURATION;
        if name == WEIGHTS && member.is_plain() {
            weights = Some(hdf5::read(source, member.at, member.size_bytes)?);
        } else {
            other |= name.starts_with(OTHER_WEIGHTS);
        }
        Ok(())
    })?;
    let entries = directory.entries;
    match (is_keras, configured, weights) {
        (false, ..) => Err(Stop::unknown(format!("none of its {entries} members says which Keras wrote it"))),
        (true, false, _) => Err(Stop::broken(format!("config.json is not among its {entries} members"))),
        (true, true, None) if other => {
            Err(Stop::unknown("its weights are not in model.weights.h5 as they are"))
        }
        (true, true, None) => {
            Err(Stop::broken(format!("model.weights.h5 is not among its {entries} members")))
        }
        (true, true, Some(reason)) => Ok(format!("its configuration is there, and of its weights: {reason}")),
    }
}
