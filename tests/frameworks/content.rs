//! Verdicts of the content readers on files that packages wrote: no whole file is called broken, and broken files are found.
//!
//! Owns: the comparison. Does not own: writing a file, and breaking off a save (`content_files.py`, and the scripts of
//! `packages`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs};

use tidemark_content::{Format, Judgement, Limits, Verdict, judge};
use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::machine;

use crate::{environment, script};

/// Number of random places at which each file of the corpus is cut.
const CUTS: u64 = 200;
/// Number of cuts of each file that a package saved while it trained. `--long` takes [`CUTS`].
const CUTS_OF_A_SAVE: u64 = 5;
/// Bytes that may be needed to recognise a format. The longest header before the first sure sign is tar's.
const BEGINNING_BYTES: u64 = 512;
/// Variable with the seed of the cuts. Without it, a seed is drawn and shown.
const SEED_ENV: &str = "TIDEMARK_CONTENT_SEED";

fn judged(bytes: &[u8]) -> Judgement {
    // The reader's clock stands still, because time is no subject here and a machine may be busy.
    judge(&bytes, bytes.len() as u64, &Limits::default(), &|| Duration::ZERO)
}

/// Whether a file's own format proves that it is whole.
pub(crate) fn is_whole(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| judged(&bytes).verdict == Verdict::Whole)
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let (mut found, mut todo) = (vec![], vec![directory.to_path_buf()]);
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(&directory).expect("a directory of the test") {
            let entry = entry.expect("an entry of the test");
            let kind = entry.file_type().expect("its type");
            if kind.is_dir() {
                todo.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    found
}

/// Verdicts on some files.
#[derive(Default)]
pub(crate) struct Said {
    /// Numbers by format: files, whole files, and cuts that were found.
    formats: BTreeMap<Option<Format>, [u64; 3]>,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (format, [files, whole, cuts]) in &self.formats {
            let format = format.map_or_else(|| "no format".to_owned(), |format| format.to_string());
            write!(f, "{format}: {files} files, {whole} whole, {cuts} cuts found; ")?;
        }
        Ok(())
    }
}

impl Said {
    /// Judges a file as it is, and cut at random places.
    fn of(&mut self, path: &Path, cuts: u64, dice: &mut Dice) -> Judgement {
        let bytes = fs::read(path).expect("a file of the test");
        let found = judged(&bytes);
        assert_ne!(found.verdict, Verdict::Broken, "{}: {}", path.display(), found.reason);
        let row = self.formats.entry(found.format).or_default();
        row[0] += 1;
        row[1] += u64::from(found.verdict == Verdict::Whole);
        if found.verdict != Verdict::Whole {
            return found;
        }
        // A tar file ends with more zeros than it needs, and a cut among them loses nothing.
        let filled = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
        for _ in 0..cuts {
            let end = dice.within(0..bytes.len() as u64);
            let cut = judged(&bytes[..usize::try_from(end).expect("files of the test are small")]);
            let shown =
                || format!("{} of {} bytes, cut at {end}: {}", path.display(), bytes.len(), cut.reason);
            if found.format == Some(Format::Tar) && end >= filled {
                continue;
            }
            assert_ne!(cut.verdict, Verdict::Whole, "{}", shown());
            // A tar file may end between two members.
            let may_end = found.format == Some(Format::Tar) && end.is_multiple_of(BEGINNING_BYTES);
            if end >= BEGINNING_BYTES && !may_end {
                assert_eq!(cut.verdict, Verdict::Broken, "{}", shown());
                row[2] += 1;
            }
        }
        found
    }
}

/// Judges all files that a package saved. None may be broken, and a whole file must no longer be whole when it is cut.
pub(crate) fn of_saves(directory: &Path, dice: &mut Dice) -> Said {
    let cuts = if machine::long() { CUTS } else { CUTS_OF_A_SAVE };
    let mut said = Said::default();
    for path in files(directory) {
        said.of(&path, cuts, dice);
    }
    said
}

#[test]
fn whole_files_are_not_broken_and_what_was_broken_off_is_found() {
    let Some(python) = environment() else { return };
    let scratch = tempfile::tempdir().expect("a directory");
    let text = scratch.path().to_str().expect("paths of tests are UTF-8");
    let long: &[&str] = if machine::long() { &["long"] } else { &[] };
    python.run(&script("content_files.py"), &[&[text], long].concat());
    let seed = std::env::var(SEED_ENV).ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("{SEED_ENV}={seed}");
    let mut dice = Dice::new(seed);

    let (mut said, mut formats) = (Said::default(), BTreeSet::new());
    for path in files(&scratch.path().join("whole")) {
        let found = said.of(&path, CUTS, &mut dice);
        assert_eq!(found.verdict, Verdict::Whole, "{}: {}", path.display(), found.reason);
        formats.extend(found.format);
    }
    use Format::{Hdf5, Keras, Npy, Npz, Pickle, Safetensors, Tar, TorchLegacy, TorchZip};
    for format in [TorchZip, Safetensors, TorchLegacy, Hdf5, Keras, Pickle, Npz, Npy, Tar] {
        assert!(formats.contains(&format), "no {format} is among the files");
    }
    println!("{said}");

    let undecided = of_saves(&scratch.path().join("undecided"), &mut dice);
    println!("undecided: {undecided}");
    for path in files(&scratch.path().join("broken")) {
        let found = judged(&fs::read(&path).expect("a file of the test"));
        assert_eq!(found.verdict, Verdict::Broken, "{}: {}", path.display(), found.reason);
        println!("{}: {}", path.display(), found.reason);
    }
    // The formats of these files cannot reveal such losses.
    for path in files(&scratch.path().join("fewer")) {
        let found = judged(&fs::read(&path).expect("a file of the test"));
        assert_eq!(found.verdict, Verdict::Whole, "{}: {}", path.display(), found.reason);
    }
}
