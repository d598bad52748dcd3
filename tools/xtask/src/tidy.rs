//! Checks of the files themselves: that each says what it is for, stays short, and keeps to itself.
//!
//! Owns: the limits and the list of files that may hold `unsafe`. Does not own: formatting and lints (rustfmt,
//! clippy).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::prose::Prose;
use crate::workspace::Workspace;

/// Beyond this a file has more than one subject.
const LINES_MAX: usize = 700;

/// Paths and names of machines that are not part of the product. Written in halves, so that this file passes.
const FORBIDDEN_WORDS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("../sha", "red"),
    concat!("shared/des", "ign"),
    concat!("index.cra", "tes.io"),
    concat!("static.cra", "tes.io"),
    concat!("pypi", ".org"),
    concat!("pythonhosted", ".org"),
];

/// Where `unsafe` may stand, and for what. A folder covers what lies below it.
const UNSAFE_ALLOWED: &[(&str, &str)] = &[
    ("engine/tier1/src/lease.rs", "fcntl leases, which no safe crate offers"),
    ("engine/tier1/src/mapping.rs", "read-only memory mappings of backing files"),
    ("engine/tier1/src/tests.rs", "mappings and leases as another process would hold them"),
    ("engine/namespace/src/pidfd.rs", "the ioctl that tells how a process ended"),
    ("engine/store/src/posix/ring.rs", "io_uring: the kernel is given addresses"),
    ("engine/tier1/src/priority.rs", "the scheduling class of a thread"),
    ("tools/ckptctl/src/sample.rs", "the mapping that `bench mount` times"),
    ("fuse/src/device.rs", "the ioctls of /dev/fuse"),
    ("fuse/src/handshake.rs", "replacing the descriptor beneath fuser's session"),
    ("fuse/keeper/src/sys.rs", "signals as a descriptor, and descriptors across exec"),
    ("fuse/src/handle/mod.rs", "owning a descriptor that the kernel handed out"),
    ("kernels/src/checksum", "SIMD"),
    ("kernels/src/compress/cpu/dispatch.rs", "SIMD"),
    ("kernels/src/compress/cuda", "launches of device code"),
    ("kernels/src/cuda", "calls of CUDA's driver and compiler"),
    ("kernels/src/replay/cpu/dispatch.rs", "SIMD"),
    ("kernels/src/replay/cuda", "launches of device code"),
    ("tools/python/src/mapping.rs", "a mapping of the file, stores past the cache, a handler of SIGBUS"),
    ("tools/python/src/copy.rs", "the memory of tensors, and descriptors that Python owns"),
    ("transport/examples/receive.rs", "a writable mapping, to be measured against the others"),
    ("benches", "baselines that use the raw calls they are compared with"),
    ("tests/survive/systemd.rs", "descriptors under fixed numbers, as systemd passes them"),
    ("tests/survive/workload.rs", "a shared mapping as a program stores into it"),
    ("tests/mount", "system calls as a program makes them"),
    ("tests/posix/differential", "system calls as a program makes them"),
    ("tests/harness/bin/trainer/calls.rs", "close and shared mappings as a trainer makes them"),
    ("tests/harness/campaign/page.rs", "a page of memory that two processes share"),
];

/// Folders and files that are not ours to check.
const SKIPPED: &[&str] = &["target", ".git", "Cargo.lock", "LICENSE"];

/// Returns the problems, one line each; empty when all is tidy.
pub(crate) fn problems(workspace: &Workspace) -> Result<Vec<String>> {
    let mut problems = vec![];
    let mut prose = Prose::default();
    for path in files(&workspace.root)? {
        // Test vectors and pictures are no text, and hold none of our words.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let shown = workspace.shown(&path);
        problems.extend(word_problems(&shown, &text));
        if path.extension().is_some_and(|ending| ending == "rs") {
            problems.extend(source_problems(&shown, &text));
            prose.read(&shown, &text);
        }
    }
    problems.extend(prose.problems());
    Ok(problems)
}

/// Every file below a folder, sorted, without what is built or fetched.
pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![];
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if SKIPPED.iter().any(|name| entry.file_name() == *name) {
                continue;
            }
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A line of Rust without the comment at its end. Text in strings that looks like one is cut too; that is harmless
/// for the checks here, which look for code.
pub(crate) fn without_comment(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

fn word_problems(shown: &str, text: &str) -> Vec<String> {
    let mut problems = vec![];
    for (index, line) in text.lines().enumerate() {
        for word in FORBIDDEN_WORDS.iter().filter(|word| line.contains(**word)) {
            problems.push(format!("{shown}:{} says `{word}`, which exists on one machine only", index + 1));
        }
    }
    problems
}

fn source_problems(shown: &str, text: &str) -> Vec<String> {
    let mut problems = vec![];
    if !text.starts_with("//! ") {
        problems
            .push(format!("{shown} does not open with `//!`: say what the file owns and what it does not"));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX {
        problems
            .push(format!("{shown} has {lines} lines, more than {LINES_MAX}: it has more than one subject"));
    }
    let allowed = UNSAFE_ALLOWED.iter().any(|(path, _)| Path::new(shown).starts_with(path));
    if let Some(line) = (!allowed).then(|| text.lines().position(is_unsafe)).flatten() {
        problems.push(format!("{shown}:{} is unsafe, and the file is not on the list in tidy.rs", line + 1));
    }
    problems
}

/// The beginnings of unsafe code. Written in halves, so that this file passes.
const UNSAFE_CODE: &[&str] = &[
    concat!("uns", "afe {"),
    concat!("uns", "afe fn"),
    concat!("uns", "afe impl"),
    concat!("uns", "afe trait"),
    concat!("uns", "afe extern"),
];

fn is_unsafe(line: &str) -> bool {
    let code = without_comment(line);
    UNSAFE_CODE.iter().any(|word| code.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_is_for_first() {
        assert_eq!(source_problems("a.rs", "use std::fs;\n//! late\n").len(), 1);
        assert!(source_problems("a.rs", "//! Owns a.\n").is_empty());
    }

    #[test]
    fn a_long_file_is_found() {
        let text = format!("//! a\n{}", "\n".repeat(LINES_MAX));
        assert_eq!(source_problems("a.rs", &text).len(), 1);
        assert!(source_problems("a.rs", &text[..text.len() - 1]).is_empty());
    }

    #[test]
    fn unsafe_stands_only_where_it_may() {
        for beginning in UNSAFE_CODE {
            let text = format!("//! a\nlet a = 1;\n{beginning}\n");
            assert_eq!(source_problems("engine/src/save/a.rs", &text).len(), 1, "{beginning}");
            assert!(source_problems("engine/tier1/src/mapping.rs", &text).is_empty());
        }
        assert!(source_problems("engine/src/save/a.rs", "//! a\n// unsafe { } is not used\n").is_empty());
    }

    #[test]
    fn a_path_of_one_machine_is_found() {
        let text = format!("a\nsee {}x\n", FORBIDDEN_WORDS[0]);
        assert_eq!(word_problems("README.md", &text).len(), 1);
        assert!(word_problems("README.md", "network/ and framework/\n").is_empty());
    }
}
